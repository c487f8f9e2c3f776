"""Meter: counts the bytes that a rank sends and the time that it waits for other ranks, by kind of traffic."""

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
    """The counters of one rank.

    Attributes:
        sent: bytes sent since `reset`, by kind of traffic.
        trace: spans for a chrome trace; None unless the user asked for one.
        device: the device on which the rank computes.
        timeline: when the rank waited during the request.
        tally: the operations that the rank issued during the request.
    """

    sent: Counter[str] = field(default_factory=Counter)
    trace: Trace | None = None
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    timeline: Timeline = field(default_factory=Timeline)
    tally: Tally = field(default_factory=Tally)
    _blocked: float = 0.0
    _origin: tuple[float, torch.cuda.Event] | None = None
    _waits: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = field(default_factory=list)

    def begin_request(self) -> None:
        """Start a new timeline and a new tally."""
        self.timeline = Timeline()
        self.tally.reset()

    def reset(self) -> None:
        """Set bytes and waits to zero; the timeline continues. The GPU must be idle."""
        self.sent.clear()
        self._blocked = 0.0
        self._waits.clear()
        now = self._record()
        self._origin = None if now is None else (time.perf_counter(), now)

    @contextmanager
    def wait(self, kind: str) -> Iterator[None]:
        """Count the time in this context as waiting.

        On a GPU, count the time in which its stream waits: NCCL makes the stream wait, not the host.
        """
        start, begin_event = time.perf_counter(), self._record()
        with self.span(f"wait {kind}"):
            yield
        end_event = self._record()
        if begin_event is not None and end_event is not None:
            self._waits.append((kind, begin_event, end_event))
        else:
            end = time.perf_counter()
            self._blocked += end - start
            self.timeline.add(kind, start, end)

    def waiting_seconds(self) -> float:
        """Return the seconds since `reset` in which the rank waited for communication. Waits until the GPU is idle."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        for kind, begin_event, end_event in self._waits:
            seconds = begin_event.elapsed_time(end_event) / 1e3
            self._blocked += seconds
            if self._origin is not None:
                origin_time, origin_event = self._origin
                start = origin_time + origin_event.elapsed_time(begin_event) / 1e3
                self.timeline.add(kind, start, start + seconds)
        self._waits.clear()
        return self._blocked

    def _record(self) -> torch.cuda.Event | None:
        """Return an event in the GPU's current stream; None on a CPU."""
        if self.device.type != "cuda":
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def span(self, name: str, **arguments: int) -> AbstractContextManager[None]:
        """Record the time in this context, if there is a trace."""
        return nullcontext() if self.trace is None else self.trace.span(name, **arguments)
