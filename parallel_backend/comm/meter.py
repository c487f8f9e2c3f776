"""Counting the bytes a rank sends and the time it waits, by kind of traffic."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
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
        with self.span(f"wait {kind}"):
            yield
        self.waiting += time.perf_counter() - start

    def span(self, name: str, **arguments: int) -> AbstractContextManager[None]:
        """Record the time spent inside, if a trace was asked for."""
        return nullcontext() if self.trace is None else self.trace.span(name, **arguments)
