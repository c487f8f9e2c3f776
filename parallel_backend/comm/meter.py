"""Counting the bytes a rank sends and the time it waits, by kind of traffic, and when it waited."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field

import torch

from .tally import Tally
from .timeline import Timeline
from .trace import Trace


@dataclass
class Meter:
    """One rank's counters, for a rank that computes on `device`."""

    sent: Counter[str] = field(default_factory=Counter)
    trace: Trace | None = None
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    timeline: Timeline = field(default_factory=Timeline)
    tally: Tally = field(default_factory=Tally)
    _blocked: float = 0.0
    _base: tuple[float, torch.cuda.Event] | None = None
    _waits: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = field(default_factory=list)

    def begin(self) -> None:
        """Begin a request, and with it a new timeline and a new count of operations."""
        self.timeline = Timeline()
        self.tally.begin()

    def reset(self) -> None:
        """Count from here what is sent and waited for; the timeline goes on. The GPU has nothing to do."""
        self.sent.clear()
        self._blocked = 0.0
        self._waits.clear()
        now = self._record()
        self._base = None if now is None else (time.perf_counter(), now)

    @contextmanager
    def wait(self, kind: str) -> Iterator[None]:
        """Count the time spent inside as waiting.

        On a GPU that is the time in which its stream does not get on: NCCL lets the stream wait, and not the host.
        """
        start, begun = time.perf_counter(), self._record()
        with self.span(f"wait {kind}"):
            yield
        ended = self._record()
        if begun is not None and ended is not None:
            self._waits.append((kind, begun, ended))
        else:
            end = time.perf_counter()
            self._blocked += end - start
            self.timeline.add(kind, start, end)

    def waiting(self) -> float:
        """Seconds of this run in which the rank waited for communication; waits for its GPU to be done."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        for kind, begun, ended in self._waits:
            seconds = begun.elapsed_time(ended) / 1e3
            self._blocked += seconds
            if self._base is not None:
                started, base = self._base
                at = started + base.elapsed_time(begun) / 1e3
                self.timeline.add(kind, at, at + seconds)
        self._waits.clear()
        return self._blocked

    def _record(self) -> torch.cuda.Event | None:
        """A moment of the GPU's stream; None without one."""
        if self.device.type != "cuda":
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def span(self, name: str, **arguments: int) -> AbstractContextManager[None]:
        """Record the time spent inside, if a trace was asked for."""
        return nullcontext() if self.trace is None else self.trace.span(name, **arguments)
