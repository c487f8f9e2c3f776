"""Counting the bytes a rank sends and the time it waits, by kind of traffic."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from .trace import Trace


@dataclass
class Meter:
    """One rank's counters. `waiting` is seconds in which the main thread was blocked by communication."""

    sent: Counter[str] = field(default_factory=Counter)
    waiting: float = 0.0
    trace: Trace | None = None

    def reset(self) -> None:
        """Begin a new run."""
        self.sent.clear()
        self.waiting = 0.0

    @contextmanager
    def wait(self, kind: str) -> Iterator[None]:
        """Count the time spent inside as waiting."""
        start = time.perf_counter()
        try:
            yield
        finally:
            end = time.perf_counter()
            self.waiting += end - start
            if self.trace is not None:
                self.trace.add(f"wait {kind}", start, end)
