"""Results about this machine, kept on disk: a JSON file for each result, named by the hash of its key."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import threading
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

Cached = TypeVar("Cached", bound=msgspec.Struct)

log = logging.getLogger(__name__)


def cache_folder() -> Path:
    """Return the pack's own folder in $XDG_CACHE_HOME, or in ~/.cache without that variable."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "comfyui-parallel"


def write_whole(path: Path, data: bytes) -> None:
    """Write a file atomically: no reader ever sees a part of it, even if the disk is full.

    Raises:
        OSError: the file cannot be written. An earlier file at the path is unchanged, and no temporary file is left.
    """
    own = path.with_name(f"{path.name}.{os.getpid()}-{threading.get_ident()}")
    try:
        own.write_bytes(data)
        own.replace(path)
    finally:
        with contextlib.suppress(OSError):
            own.unlink(missing_ok=True)


class DiskCache(Generic[Cached]):
    """The cached results of one class.

    Args:
        name: the beginning of the names of the files.
        kind: the class of the results.
        folder: the folder of the files; by default the cache folder.
    """

    def __init__(self, name: str, kind: type[Cached], folder: Path | None = None) -> None:
        self._name, self._kind, self._folder = name, kind, folder or cache_folder()

    def read(self, key: str) -> Cached | None:
        """Return the result of a key; None if there is none. A damaged file is ignored with a warning in the log."""
        return self._read(self._path(key))

    def write(self, key: str, value: Cached) -> None:
        """Store the result of a key. If the folder is not writable, log that; the caller computes the result anew later."""
        path = self._path(key)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, msgspec.json.encode(value))
        except OSError as error:
            log.info("Parallel: %s cannot be written (%s), so its result is computed again next time.", path, error)

    def all(self) -> tuple[Cached, ...]:
        """Return all results that can be read, the newest last."""
        paths = sorted(self._paths(), key=lambda path: path.stat().st_mtime)
        return tuple(entry for path in paths if (entry := self._read(path)) is not None)

    def forget(self) -> None:
        """Remove all results."""
        for path in self._paths():
            path.unlink(missing_ok=True)

    def _paths(self) -> list[Path]:
        return [*self._folder.glob(f"{self._name}-*.json")]

    def _path(self, key: str) -> Path:
        return self._folder / f"{self._name}-{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"

    def _read(self, path: Path) -> Cached | None:
        try:
            return msgspec.json.decode(path.read_bytes(), type=self._kind)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
            log.warning("Parallel: %s is ignored, as it cannot be read (%s).", path, error)
            return None
