"""How a process lives that proves for another one."""

from __future__ import annotations

import os
import signal

NICE = 5


def end_with_the_asker() -> None:
    """Leave with all ranks when the asker goes, however it goes."""
    os.read(0, 1)  # not through sys.stdin, whose lock forked ranks would wait for for ever
    os.killpg(os.getpid(), signal.SIGKILL)
