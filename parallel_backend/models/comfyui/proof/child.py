"""The life of a process that proves for another process."""

from __future__ import annotations

import os
import signal

NICE = 5


def end_with_the_asker() -> None:
    """Kill this process and all its ranks when the parent process ends for any reason."""
    os.read(0, 1)  # not through sys.stdin: forked ranks would wait for its lock for ever
    os.killpg(os.getpid(), signal.SIGKILL)
