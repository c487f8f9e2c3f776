"""The disk cache keeps nothing of a file that could not be written completely."""

from __future__ import annotations

import resource
from pathlib import Path

import msgspec
import pytest

from parallel_backend.cache import DiskCache, write_whole


class Sample(msgspec.Struct, frozen=True):
    """A value to be kept."""

    text: str


@pytest.mark.parametrize("room", [0, 100])
def test_a_full_disk_leaves_only_the_earlier_file(tmp_path: Path, room: int) -> None:
    """A limit of file sizes acts as a full disk."""
    store = DiskCache("machine", Sample, tmp_path)
    store.write("key", Sample("before"))
    (kept,) = tmp_path.iterdir()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, limits[1]))
    try:
        store.write("key", Sample("x" * 1000))
        store.write("another key", Sample("x" * 1000))
        with pytest.raises(OSError, match="File too large"):
            write_whole(tmp_path / "file", b"x" * 1000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [*tmp_path.iterdir()] == [kept]
    assert store.read("key") == Sample("before")
