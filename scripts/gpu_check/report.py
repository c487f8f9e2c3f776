"""Report: the lines of a list of checks, printed with PASS, FAIL or INFO, and written to a file with their figures."""

from __future__ import annotations

import gc
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec
import torch

Work = Callable[[], object]

LINES = "PARALLEL_GPU_LINES"
"""The environment variable that names the file to which each line is added, as JSON; without it nothing is written."""


class Line(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A line of a report.

    Attributes:
        checks: the name of the list.
        device: the name of the card, or "cpu".
        verdict: PASS, FAIL or INFO.
        name: of what was checked or measured.
        text: what was found, in words.
        figures: what was found, in numbers, in the units of a `plan.predict.profiles.Device` (FLOP/s, bytes/s, bytes, seconds).
    """

    checks: str
    rank: int
    device: str
    verdict: str
    name: str
    text: str
    figures: Mapping[str, float] = {}


def lines_of(file: Path) -> list[Line]:
    """Return the lines of a report's file.

    Raises:
        msgspec.DecodeError: a line is none of a report.
    """
    return [msgspec.json.decode(line, type=Line) for line in file.read_bytes().splitlines()]


class Report(ABC):
    """A list of checks on one rank, of a GPU or of the CPU."""

    def __init__(self, kind: str) -> None:
        self.rank = int(os.environ.get("LOCAL_RANK", 0))
        self.cuda = kind == "cuda"

    @abstractmethod
    def run(self) -> None:
        """All checks of the list."""

    def say(self, name: str, passed: bool | None, text: object = "", **figures: float) -> None:
        """Print a line, and add it to the file that LINES names; `passed` is None for information."""
        verdict = "INFO" if passed is None else "PASS" if passed else "FAIL"
        print(f"[{self.rank}] {verdict} {name}: {text}\n", end="", flush=True)  # in one piece: other ranks write too
        if file := os.environ.get(LINES):
            device = torch.cuda.get_device_name() if self.cuda else "cpu"
            line = Line(type(self).__name__.lower(), self.rank, device, verdict, name, str(text), figures)
            with open(file, "ab", buffering=0) as lines:
                lines.write(msgspec.json.encode(line) + b"\n")

    def each(self, *checks: Work) -> None:
        """One after another; one that raises is a failure, and the next one runs."""
        for check in checks:
            try:
                check()
            except Exception as error:
                name = getattr(check, "__name__", None) or check.func.__name__  # type: ignore[attr-defined]
                self.say(name, False, f"{type(error).__name__}: {str(error)[:300]}")
            gc.collect()  # models are in circles
            if self.cuda:
                torch.cuda.empty_cache()
