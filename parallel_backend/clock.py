"""A clock for deadlines that does not count the time for which this process was stopped."""

from __future__ import annotations

import threading
import time

LONGEST_STEP = 0.5
"""Seconds that pass at most between two looks at the clock; whoever waits looks several times a second."""


class AwakeClock:
    """A monotonic clock that leaves out pauses of this process: SIGSTOP, a debugger, a suspended machine.

    A deadline compares now with a time that a thread has noted, such as that of a heartbeat. In a pause the other
    process goes on, and this one notes nothing. After it, a usual clock says that the other process was silent.

    The clock must be read often while a deadline runs. Of a longer time between two readings it counts `longest_step`
    seconds. Any thread may read it.
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
