"""A clock for deadlines that does not count the time for which this process was stopped, and the seconds of a step."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Sequence
from itertools import pairwise

LONGEST_STEP = 0.5
"""The largest number of seconds that count between two readings of the clock. Waiting code reads it several times a second."""


class AwakeClock:
    """A monotonic clock that leaves out pauses of this process: SIGSTOP, a debugger, a suspended machine.

    A deadline compares the present with a time that a thread has noted, such as that of the last heartbeat. During a pause
    the other process goes on, but this process notes nothing. By an ordinary clock, the other process would seem silent.

    The clock must be read often while a deadline runs: between two readings it counts at most `longest_step` seconds. Any
    thread may read it.
    """

    def __init__(self, longest_step: float = LONGEST_STEP) -> None:
        self._longest_step = longest_step
        self._read_at = time.monotonic()
        self._now = 0.0
        self._lock = threading.Lock()

    def now(self) -> float:
        """Return the seconds for which this process has been awake since the clock was made."""
        with self._lock:
            read_at = time.monotonic()
            self._now += min(read_at - self._read_at, self._longest_step)
            self._read_at = read_at
            return self._now


def seconds_per_step(times: Sequence[Sequence[float]]) -> float:
    """Return the median seconds between consecutive steps of a sampler; 0 if no sampler has two steps.

    Args:
        times: for each sampler the times at which its steps end, in seconds.
    """
    return statistics.median([after - before for moments in times for before, after in pairwise(moments)] or [0.0])
