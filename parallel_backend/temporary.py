"""Temporary files that nobody has to remove, and folders that a later process removes if their owner could not."""

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
    """Provide the descriptor of a file in memory that has no name in any folder.

    The kernel frees the file with its last descriptor, however the processes with a descriptor end. A forked process opens
    the file at `path_of` of the descriptor. Another process must inherit the descriptor first.
    """
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def path_of(descriptor: int, process: int | None = None) -> Path:
    """Return the path by which a process opens its own descriptor, or one of another process of the same user."""
    return Path(f"/proc/{'self' if process is None else process}/fd/{descriptor}")


class OwnedFolder:
    """A folder that only the user can open (mode 0700) and that is locked as long as the process that made it lives.

    The kernel releases the lock however that process ends, and `sweep` removes folders without a lock.

    Args:
        parent: the temporary folder in which the folder is made.
        kind: a word for the folder's name.

    Raises:
        OSError: the folder cannot be made.
    """

    def __init__(self, parent: str, kind: str = "") -> None:
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=PREFIX + kind, dir=parent))
            try:
                self._lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            except OSError:
                self.path.rmdir()
                raise
            with contextlib.suppress(OSError):  # a file system without locks, where `sweep` removes nothing either
                fcntl.flock(self._lock, fcntl.LOCK_EX)
            if self.path.exists():
                return
            os.close(self._lock)  # another process swept the folder before it was locked

    def remove(self) -> None:
        """Remove the folder with its contents, even if this process has no free file descriptors."""
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
    """Remove this user's folders in a temporary folder that processes which have ended did not remove.

    Symbolic links, other users' entries, locked folders and entries that are not folders stay. This function never raises.
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
