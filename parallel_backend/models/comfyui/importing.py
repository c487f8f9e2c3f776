"""Import of ComfyUI's modules in a worker, with the arguments of the host's ComfyUI."""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Mapping

import torch

from ...comfyui_folder import ARGUMENTS, FOLDER
from ...errors import Refused


def import_comfyui(variables: Mapping[str, str] = os.environ) -> None:
    """Make ComfyUI's modules importable in this process. In ComfyUI's own process, they already are.

    Raises:
        Refused: ComfyUI's folder is unknown, or has no ComfyUI in it.
    """
    if "comfy.cli_args" in sys.modules:
        return
    folder = variables.get(FOLDER, "")
    if not os.path.isdir(os.path.join(folder, "comfy")):
        raise Refused(
            f"this worker does not find ComfyUI ({folder or 'no folder is named'}): start it with --comfyui and ComfyUI's folder "
            "on its machine."
        )
    sys.path.append(folder)  # last: ComfyUI's folder has modules of its own called nodes and tests
    options = importlib.import_module("comfy.options")
    default = [] if torch.cuda.is_available() else ["--cpu"]
    arguments = json.loads(variables[ARGUMENTS]) if ARGUMENTS in variables else default
    argv, sys.argv = sys.argv, ["main.py", *arguments]
    try:
        options.enable_args_parsing()
        importlib.import_module("comfy.cli_args")
    finally:
        sys.argv = argv
