"""Meter: counts the bytes that a rank sends and the time that it waits for other ranks, by kind of traffic."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist


class OperationKind(NamedTuple):
    """A kind of operation: the communicator's name and the world ranks that take part."""

    name: str
    ranks: tuple[int, ...]


@dataclass
class Tally:
    """The operations that this rank has issued since `reset`, and the asynchronous ones that it has not waited for."""

    issued: Counter[OperationKind] = field(default_factory=Counter)
    _pending: dict[int, dist.Work] = field(default_factory=dict)

    def reset(self) -> None:
        """Forget all operations."""
        self.issued.clear()
        self._pending.clear()

    def count(self, name: str, ranks: Sequence[int]) -> None:
        """Count an operation of these world ranks."""
        self.issued[OperationKind(name, tuple(ranks))] += 1

    def add_pending(self, work: dist.Work) -> None:
        """Note an asynchronous operation."""
        self._pending[id(work)] = work

    def wait(self, work: dist.Work) -> None:
        """Wait for an asynchronous operation."""
        work.wait()
        self._pending.pop(id(work), None)

    def wait_for_all(self) -> None:
        """Wait for all asynchronous operations. The other ranks must have issued their counterparts."""
        for work in list(self._pending.values()):
            self.wait(work)


BINS = 256
"""The number of bins of a timeline."""

INITIAL_WIDTH = 1 / 1024
"""Seconds of a bin at the start. The width only doubles when a request needs more, so the bins of several ranks line up."""


class Timeline:
    """Seconds waited in each bin, by kind of traffic, counted from the object's creation.

    Attributes:
        begun: the start, by `time.perf_counter`.
        width: seconds of a bin.
        waiting: for each kind of traffic the seconds waited in each bin.
    """

    def __init__(self) -> None:
        self.begun = time.perf_counter()
        self.width = INITIAL_WIDTH
        self.waiting: dict[str, list[float]] = {}

    def add(self, kind: str, begin: float, end: float) -> None:
        """Add a wait from `begin` to `end` (by `time.perf_counter`) to the bins that it overlaps."""
        begin, end = max(0.0, begin - self.begun), max(0.0, end - self.begun)
        while end >= BINS * self.width:
            self.width *= 2
            self.waiting = {name: merge_pairs(bins) for name, bins in self.waiting.items()}
        bins = self.waiting.setdefault(kind, [0.0] * BINS)
        first, last = int(begin / self.width), int(end / self.width)
        if first == last:
            bins[first] += end - begin
            return
        bins[first] += (first + 1) * self.width - begin
        for index in range(first + 1, last):
            bins[index] = self.width
        bins[last] += end - last * self.width


def merge_pairs(bins: list[float]) -> list[float]:
    """Return the same number of bins of twice the width; the second half is empty."""
    return [bins[index] + bins[index + 1] for index in range(0, len(bins), 2)] + [0.0] * (len(bins) // 2)


DIRECTORY = "PARALLEL_TRACE"
"""The environment variable with the folder for `trace-rankN.json`. Without it, no trace is written."""


class Trace:
    """The spans of one rank. Times are of the machine's monotonic clock, so the ranks of one machine can be compared."""

    def __init__(self, directory: str, rank: int) -> None:
        self._path = Path(directory) / f"trace-rank{rank}.json"
        self._rank = rank
        self._spans: list[dict[str, object]] = []

    @contextmanager
    def span(self, name: str, **arguments: int) -> Iterator[None]:
        """Record the time in this context, in microseconds of `time.perf_counter`."""
        start = time.perf_counter()
        yield
        end = time.perf_counter()
        span = {"name": name, "ph": "X", "pid": self._rank, "tid": 0, "ts": start * 1e6, "dur": (end - start) * 1e6}
        self._spans.append(span | {"args": arguments})

    def write(self) -> None:
        """Write the file with the spans recorded since the last call."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(json.dumps({"traceEvents": self._spans}))
        self._spans.clear()


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
