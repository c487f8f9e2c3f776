"""Temporary files that nobody has to remove, and folders that a later process removes where their owner could not."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

PREFIX = "comfyui-parallel-"
"""The beginning of the names of this pack's folders in a temporary folder."""


@contextlib.contextmanager
def memory_file(name: str) -> Iterator[int]:
    """A file in memory that has no name in any folder; yields its descriptor.

    The kernel frees the file with its last descriptor, however the processes end that have one. Forked processes open it
    at `path_of` of the descriptor; others inherit the descriptor first.
    """
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def path_of(descriptor: int, process: int | None = None) -> Path:
    """Return the path at which a process opens a descriptor of its own, or of another process of the same user."""
    return Path(f"/proc/{'self' if process is None else process}/fd/{descriptor}")


class OwnedFolder:
    """A folder of the user's alone (mode 0700) that is locked as long as its owner lives.

    The kernel releases the lock however the owner ends, and `sweep` removes folders that nobody has locked.

    Args:
        parent: the temporary folder in which it is made.
        kind: a word for its name.

    Raises:
        OSError: it cannot be made.
    """

    def __init__(self, parent: str, kind: str = "") -> None:
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=PREFIX + kind, dir=parent))
            try:
                self._lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            except OSError:
                self.path.rmdir()
                raise
            with contextlib.suppress(OSError):  # a file system without locks, on which nothing is swept either
                fcntl.flock(self._lock, fcntl.LOCK_EX)
            if self.path.exists():
                return
            os.close(self._lock)  # another process swept the folder before it was locked

    def remove(self) -> None:
        """Remove the folder with all that is in it; a want of file numbers does not keep it."""
        if self._lock < 0:
            return
        os.close(self._lock)
        self._lock = -1
        shutil.rmtree(self.path, ignore_errors=True)
        with contextlib.suppress(OSError):
            for name in os.listdir(self.path):
                (self.path / name).unlink()
        with contextlib.suppress(OSError):
            self.path.rmdir()

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *_: object) -> None:
        self.remove()


def sweep(parent: str) -> None:
    """Remove the folders of this user's that processes left in a temporary folder which have ended.

    It follows no link, and leaves alone what others own, what is locked, and what is no folder. It never fails.
    """
    with contextlib.suppress(OSError):
        for name in [name for name in os.listdir(parent) if name.startswith(PREFIX)]:
            _remove_if_left(Path(parent, name))


def _remove_if_left(folder: Path) -> None:
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            status = os.fstat(descriptor)
            if status.st_uid == os.geteuid() and stat.S_IMODE(status.st_mode) == stat.S_IRWXU:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(descriptor)
