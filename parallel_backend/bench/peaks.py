"""How much memory a ComfyUI and its workers take at most: of each GPU as the driver shows it, else of the computer's."""

from __future__ import annotations

import contextlib
import subprocess
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence

import psutil

from ..gpus import MEBIBYTE

SECONDS = 0.2
"""Between two looks."""

QUERY = (
    "nvidia-smi",
    "--query-gpu=uuid,memory.used",
    "--format=csv,noheader,nounits",
    f"--loop-ms={int(1000 * SECONDS)}",
)
"""Tells the bytes in use of each GPU again and again; torch's own figures leave out what is not torch's."""


class Peaks:
    """The most that was seen in use of each device, in bytes, less what was in use at first."""

    def __init__(self) -> None:
        self._first: dict[str, int] = {}
        self._most: dict[str, int] = {}

    def see(self, device: str, used: int) -> None:
        """So many bytes of a device are in use."""
        self._first.setdefault(device, used)
        self._most[device] = max(self._most.get(device, 0), used)

    @property
    def growth(self) -> dict[str, int]:
        """Return the most bytes that each device used beyond its first reading."""
        return {device: most - self._first[device] for device, most in self._most.items()}


@contextlib.contextmanager
def watched_gpus(names: Mapping[str, str], query: Sequence[str] = QUERY) -> Iterator[Peaks]:
    """The peaks of GPUs while the body runs.

    Args:
        names: what the GPUs that count are called, by their UUIDs.
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
    """The peak of the computer's memory that this process's descendants have while the body runs; what they share counts once.

    Args:
        itself: whether this process counts as well.
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
    """A process's bytes, where it shares some its part of them; 0 if it has ended."""
    try:
        return int(process.memory_full_info().pss)
    except psutil.Error:
        return 0
