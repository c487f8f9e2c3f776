"""Counting the bytes a rank sends and the time it waits, by kind of traffic."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field

import torch

from .trace import Trace


@dataclass
class Meter:
    """One rank's counters, for a rank that computes on `device`."""

    sent: Counter[str] = field(default_factory=Counter)
    trace: Trace | None = None
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    _blocked: float = 0.0
    _waits: list[tuple[torch.cuda.Event, torch.cuda.Event]] = field(default_factory=list)

    def reset(self) -> None:
        """Begin a new run."""
        self.sent.clear()
        self._blocked = 0.0
        self._waits.clear()

    @contextmanager
    def wait(self, kind: str) -> Iterator[None]:
        """Count the time spent inside as waiting.

        On a GPU that is the time in which its stream does not get on: NCCL lets the stream wait, and not the host.
        """
        start, begun = time.perf_counter(), self._mark()
        with self.span(f"wait {kind}"):
            yield
        ended = self._mark()
        if begun is not None and ended is not None:
            self._waits.append((begun, ended))
        else:
            self._blocked += time.perf_counter() - start

    def waiting(self) -> float:
        """Seconds of this run in which the rank waited for communication; waits for its GPU to be done."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return self._blocked + sum(begun.elapsed_time(ended) for begun, ended in self._waits) / 1e3

    def _mark(self) -> torch.cuda.Event | None:
        """A moment of the GPU's stream; None without one."""
        if self.device.type != "cuda":
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def span(self, name: str, **arguments: int) -> AbstractContextManager[None]:
        """Record the time spent inside, if a trace was asked for."""
        return nullcontext() if self.trace is None else self.trace.span(name, **arguments)
