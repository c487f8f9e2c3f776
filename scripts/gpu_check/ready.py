"""Checks that the other lists would start: the card, the packages, and the imports."""

from __future__ import annotations

import importlib
import os
from pathlib import Path

import torch

from parallel_backend.comfyui_folder import FOLDER

from .prompts import missing
from .report import Report

IMPORTED_LATER = (
    "comfy.sd",
    "comfy_extras.nodes_torch_compile",
    "scripts.comfyui",
    "tests.support.tiny.comfyui",
    "tests.vae.comfy_vaes",
)
"""Modules that some list imports only while it runs."""


class Ready(Report):
    """Checks that take seconds and need no model."""

    def run(self) -> None:
        """Run the checks, the card first: its name belongs before all other lines."""
        self.each(self.card, self.kernels, self.packages, self.imports)

    def card(self) -> None:
        """Report the card that torch sees."""
        if self.cuda:
            memory = torch.cuda.mem_get_info()[1] >> 20
            text = f"{torch.cuda.get_device_name()}, {memory} MiB, one of {torch.cuda.device_count()}"
            self.say("the card", True, f"{text}, torch {torch.__version__}")
        else:
            self.say("the card", None, f"none: the checks run on the CPU, torch {torch.__version__}")

    def kernels(self) -> None:
        """Report the backends of comfy-kitchen, which compute quantised layers."""
        backends = importlib.import_module("comfy_kitchen").list_backends()
        self.say("comfy-kitchen", None, ", ".join(name for name, each in backends.items() if each.get("available")))

    def packages(self) -> None:
        """Compare ComfyUI's requirements with the installed packages."""
        lacking = missing(Path(os.environ[FOLDER], "requirements.txt").read_text())
        text = f"{', '.join(lacking)} are not installed" if lacking else "all are installed"
        self.say("the packages that ComfyUI requires", not lacking, text)

    def imports(self) -> None:
        """Import the modules that the lists import while they run."""
        for name in IMPORTED_LATER:
            importlib.import_module(name)
        self.say("modules that the checks import", True, f"{len(IMPORTED_LATER)} modules")
