"""Faults for tests: a worker that fails where it is told to. Nothing is called unless the environment names a file."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

HEARTBEAT_SECONDS = 0.2
"""A fault waits this long, so that the host has heard of the phase; real ones seldom strike at its first instruction."""

LATE_SECONDS = 1.5


@dataclass(frozen=True)
class Fault:
    """What goes wrong: on which rank, in which phase, at which step (0: any)."""

    rank: int
    phase: str
    kind: str
    step: int = 0

    @classmethod
    def parse(cls, text: str) -> Fault:
        """From `rank=1,phase=sampling,step=2,kind=kill`. Raises KeyError for what is missing."""
        fields = dict(part.split("=", 1) for part in text.strip().split(","))
        return cls(int(fields["rank"]), fields["phase"], fields["kind"], int(fields.get("step", 0)))


class Faults:
    """Strikes once when the rank enters the phase that the file names, which may be written and removed at any time.

    When it strikes, the file gets `.struck` at the end of its name.
    """

    def __init__(self, file: Path, rank: int) -> None:
        self._file = file
        self._rank = rank

    def __call__(self, phase: str, step: int) -> None:
        """Called by Status when a phase or step begins."""
        try:
            fault = Fault.parse(self._file.read_text())
        except FileNotFoundError:
            return
        if (fault.rank, fault.phase) == (self._rank, phase) and fault.step in (0, step):
            time.sleep(HEARTBEAT_SECONDS)
            self._file.rename(f"{self._file}.struck")
            KINDS[fault.kind]()


def _signal(number: signal.Signals) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), number)


def _raise() -> None:
    raise RuntimeError("a fault was injected")


def _oom() -> None:
    raise torch.OutOfMemoryError("a fault was injected")


KINDS: dict[str, Callable[[], None]] = {
    "raise": _raise,
    "oom": _oom,
    "kill": _signal(signal.SIGKILL),
    "segv": _signal(signal.SIGSEGV),
    "term": _signal(signal.SIGTERM),
    "stop": _signal(signal.SIGSTOP),
    "exit0": lambda: os._exit(0),
    "exit3": lambda: os._exit(3),
    "hang": lambda: time.sleep(1e9),
    "late": lambda: time.sleep(LATE_SECONDS),
}
"""`stop` stops the whole process; `hang` its main thread, which then joins no collective; `late` is no failure."""
