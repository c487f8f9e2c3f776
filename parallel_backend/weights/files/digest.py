"""A cheap digest of a model file's content, by which other machines find their copy of the file."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

START_BYTES = 1 << 20
SAMPLES = 64
SAMPLE_BYTES = 1 << 16


def file_digest(path: str | os.PathLike[str]) -> str:
    """Return 32 hexadecimal digits: the digest of a file's size, its first MiB, and 64 samples of 64 KiB.

    The samples are spread evenly over the file, and at most 5 MiB are read. Two files of equal size that differ only between
    the samples have the same digest: such a pair has to be made on purpose. A folder's digest covers the digests of all its
    files, by name.

    Raises:
        OSError: the file cannot be read.
    """
    path = Path(path)
    digest = hashlib.blake2b(digest_size=16)
    if path.is_dir():
        for inner in sorted(inner for inner in path.rglob("*") if inner.is_file()):
            digest.update(f"{inner.relative_to(path).as_posix()} {file_digest(inner)}\n".encode())
        return digest.hexdigest()
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        digest.update(size.to_bytes(8, "little") + file.read(START_BYTES))
        step = (size - SAMPLE_BYTES) / (SAMPLES - 1)
        for sample in range(SAMPLES if step > 0 else 0):
            file.seek(int(sample * step))
            digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()


class Digests:
    """A cache of file digests. It computes a digest again only if the file's time or size has changed."""

    def __init__(self) -> None:
        self._known: dict[Path, tuple[tuple[int, int], str]] = {}

    def of(self, path: str | os.PathLike[str]) -> str:
        """Return a file's digest, computed once as long as the file does not change."""
        path = Path(path)
        status = path.stat()
        stamp = status.st_mtime_ns, status.st_size
        if self._known.get(path, (None,))[0] != stamp:
            self._known[path] = stamp, file_digest(path)
        return self._known[path][1]
