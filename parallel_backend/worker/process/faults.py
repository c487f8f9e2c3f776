"""Injection of faults for tests: a worker fails at a chosen phase. Nothing runs unless the environment names a fault file."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

HEARTBEAT_SECONDS = 0.2
"""Seconds from the start of a phase to its fault. The host then knows the phase, as it does before most real faults."""

LATE_SECONDS = 1.5


@dataclass(frozen=True)
class Fault:
    """A fault of one kind (see KINDS) on a rank, in a phase and at a step (0: any step)."""

    rank: int
    phase: str
    kind: str
    step: int = 0

    @classmethod
    def parse(cls, text: str) -> Fault:
        """Parse a text such as `rank=1,phase=sampling,step=2,kind=kill`. Raise KeyError for a missing field."""
        fields = dict(part.split("=", 1) for part in text.strip().split(","))
        return cls(int(fields["rank"]), fields["phase"], fields["kind"], int(fields.get("step", 0)))


class Faults:
    """An observer that triggers the fault in a file when the rank enters the fault's phase.

    The file may be written and removed at any time. When the fault occurs, `.struck` is appended to the file's name, so the
    fault occurs once.
    """

    def __init__(self, file: Path, rank: int) -> None:
        self._file = file
        self._rank = rank

    def __call__(self, phase: str, step: int) -> None:
        """Trigger the fault if it belongs to this phase and step. RankProgress calls this when a phase or step begins."""
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
"""The kinds of faults. `stop` stops the process; `hang` blocks only its main thread; `late` delays it, which is no failure."""
