"""What a list of checks says: a line each with PASS, FAIL or INFO."""

from __future__ import annotations

import gc
import os
from abc import ABC, abstractmethod
from collections.abc import Callable

import torch

Work = Callable[[], object]


class Report(ABC):
    """A list of checks on one rank, of a GPU or of the CPU."""

    def __init__(self, kind: str) -> None:
        self.rank = int(os.environ.get("LOCAL_RANK", 0))
        self.cuda = kind == "cuda"

    @abstractmethod
    def run(self) -> None:
        """All checks of the list."""

    def say(self, name: str, passed: bool | None, text: object = "") -> None:
        """A line; None is for information."""
        verdict = "INFO" if passed is None else "PASS" if passed else "FAIL"
        print(f"[{self.rank}] {verdict} {name}: {text}\n", end="", flush=True)  # in one piece: other ranks write too

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
