"""The peak memory of a ComfyUI and its workers: on each GPU as the driver shows it, else in the computer's memory."""

from __future__ import annotations

import contextlib
import subprocess
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence

import psutil

from ..gpus import MEBIBYTE

SECONDS = 0.2
"""Seconds between two readings."""

QUERY = (
    "nvidia-smi",
    "--query-gpu=uuid,memory.used",
    "--format=csv,noheader,nounits",
    f"--loop-ms={int(1000 * SECONDS)}",
)
"""Command that prints the used memory of each GPU again and again. Torch's figures leave out the memory of other libraries."""


class Peaks:
    """The most bytes in use on each device, less the bytes in use at the first reading."""

    def __init__(self) -> None:
        self._first: dict[str, int] = {}
        self._most: dict[str, int] = {}

    def see(self, device: str, used: int) -> None:
        """Record that `used` bytes of a device are in use."""
        self._first.setdefault(device, used)
        self._most[device] = max(self._most.get(device, 0), used)

    @property
    def growth(self) -> dict[str, int]:
        """Return the most bytes that each device used beyond its first reading."""
        return {device: most - self._first[device] for device, most in self._most.items()}


@contextlib.contextmanager
def watched_gpus(names: Mapping[str, str], query: Sequence[str] = QUERY) -> Iterator[Peaks]:
    """Watch GPUs while the body runs, and yield their peaks.

    Args:
        names: UUID of each GPU that counts -> its name.
    """
    peaks = Peaks()
    with subprocess.Popen(query, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as tool:
        assert tool.stdout is not None
        lines: Iterable[str] = tool.stdout

        def read() -> None:
            for line in lines:
                uuid, _, used = (part.strip() for part in line.partition(","))
                if uuid in names and used.isdecimal():
                    peaks.see(names[uuid], int(used) * MEBIBYTE)

        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        try:
            yield peaks
        finally:
            tool.terminate()
            reader.join()


@contextlib.contextmanager
def watched_memory(*, itself: bool = False) -> Iterator[Peaks]:
    """Watch the memory of this process's descendants while the body runs, and yield its peak. Shared memory counts once.

    Args:
        itself: True to count this process as well.
    """
    peaks, done = Peaks(), threading.Event()
    process = psutil.Process()

    def see() -> None:
        counted = [*([process] if itself else []), *process.children(recursive=True)]
        peaks.see("cpu", sum(map(_share, counted)))

    def look() -> None:
        while not done.wait(SECONDS):
            see()

    see()
    looking = threading.Thread(target=look, daemon=True)
    looking.start()
    try:
        yield peaks
    finally:
        done.set()
        looking.join()


def _share(process: psutil.Process) -> int:
    """Return a process's bytes, with its part of the memory that it shares, or 0 if it has ended."""
    try:
        return int(process.memory_full_info().pss)
    except psutil.Error:
        return 0
