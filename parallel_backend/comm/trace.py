"""Trace: a chrome-trace file of one rank's work, on request; https://ui.perfetto.dev opens it."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

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
