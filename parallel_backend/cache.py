"""What was found out on this machine, kept on disk: a file of JSON for each thing, named by its key."""

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
    """The pack's own in $XDG_CACHE_HOME, or ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "comfyui-parallel"


def write_whole(path: Path, data: bytes) -> None:
    """Write a file of which nobody ever sees a part, also where the disk is full.

    Raises:
        OSError: the file cannot be written. It is as before, and nothing else is left.
    """
    own = path.with_name(f"{path.name}.{os.getpid()}-{threading.get_ident()}")
    try:
        own.write_bytes(data)
        own.replace(path)
    finally:
        with contextlib.suppress(OSError):
            own.unlink(missing_ok=True)


class DiskCache(Generic[Cached]):
    """Things of one kind.

    Args:
        name: what the names of their files begin with.
        kind: their class.
        folder: where they are kept; by default the cache folder.
    """

    def __init__(self, name: str, kind: type[Cached], folder: Path | None = None) -> None:
        self._name, self._kind, self._folder = name, kind, folder or cache_folder()

    def read(self, key: str) -> Cached | None:
        """What is kept under a key; None if nothing is. A damaged file is ignored, and the log says so."""
        return self._read(self._path(key))

    def write(self, key: str, value: Cached) -> None:
        """Keep it if that can be: where the folder cannot be written to, it is found out again next time."""
        path = self._path(key)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, msgspec.json.encode(value))
        except OSError as error:
            log.info("Parallel: %s cannot be kept (%s).", path, error)

    def all(self) -> tuple[Cached, ...]:
        """All that can be read, the newest last."""
        paths = sorted(self._paths(), key=lambda path: path.stat().st_mtime)
        return tuple(entry for path in paths if (entry := self._read(path)) is not None)

    def forget(self) -> None:
        """Remove all of them."""
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
        except (OSError, msgspec.MsgspecError) as error:
            log.warning("Parallel: %s is ignored, as it cannot be read (%s).", path, error)
            return None
