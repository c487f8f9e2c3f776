"""A report: the lines of a list of checks, printed with PASS, FAIL or INFO and written to a file with their figures."""

from __future__ import annotations

import datetime
import gc
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch

from parallel_backend.comfyui_folder import FOLDER
from parallel_backend.plan.gpu_report import BEGINNING, ReportLine
from scripts.tested import versions

from .visit import LINES

Work = Callable[[], object]


class Report(ABC):
    """A list of checks on one rank, of a GPU or of the CPU."""

    def __init__(self, kind: str) -> None:
        self.rank = int(os.environ.get("LOCAL_RANK", 0))
        self.cuda = kind == "cuda"
        self._begun = time.monotonic()

    def begin_to_end(self) -> None:
        """Run the list between two lines of rank 0: the versions and the end. A list that crashes or hangs has no end."""
        if not self.rank:
            self.each(self.versions)
        self.run()
        if not self.rank:
            self._write(self._line(None, "the end", "of the list", end=True))

    @abstractmethod
    def run(self) -> None:
        """Run all checks of the list."""

    def versions(self) -> None:
        """Report the versions that the list runs with."""
        found = versions(Path(os.environ[FOLDER]), datetime.date.today().isoformat())
        text = f"ComfyUI {found.comfyui}, torch {found.torch}, Python {found.python}, {found.day}"
        self._write(self._line(None, BEGINNING, text, versions=found))

    def say(self, name: str, passed: bool | None, text: object = "", **figures: float) -> None:
        """Print a line, and add it to the file that LINES names.

        Args:
            passed: True, False, or None for information.
        """
        self._write(self._line(passed, name, text, figures=figures))

    def _line(self, passed: bool | None, name: str, text: object, **more: Any) -> ReportLine:
        verdict = "INFO" if passed is None else "PASS" if passed else "FAIL"
        device, seconds = torch.cuda.get_device_name() if self.cuda else "cpu", round(time.monotonic() - self._begun, 1)
        return ReportLine(
            type(self).__name__.lower(), self.rank, device, verdict, name, str(text), seconds=seconds, **more
        )

    def _write(self, line: ReportLine) -> None:
        words = f"[{line.rank}] {line.verdict} {line.name}: {line.text}\n"
        print(words, end="", flush=True)  # in one piece, because other ranks write too
        if file := os.environ.get(LINES):
            with open(file, "ab", buffering=0) as lines:
                lines.write(msgspec.json.encode(line) + b"\n")

    def each(self, *checks: Work) -> None:
        """Run the checks one after another. A check that raises counts as a failure, and the next check runs."""
        for check in checks:
            try:
                check()
            except Exception as error:
                name = getattr(check, "__name__", None) or check.func.__name__  # type: ignore[attr-defined]
                self.say(name, False, f"{type(error).__name__}: {str(error)[:300]}")
            gc.collect()  # models contain reference cycles
            if self.cuda:
                torch.cuda.empty_cache()
