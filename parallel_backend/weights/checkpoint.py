"""Checkpoints as users have them, read by header and byte range: never mapped, never read whole."""

from __future__ import annotations

import os
from pathlib import Path

from ..errors import Refused
from .entry import Checkpoint, Entry
from .safetensors_file import read_safetensors

__all__ = ["Checkpoint", "Entry", "read_header"]


def read_header(path: str | os.PathLike[str]) -> Checkpoint:
    """Read and check the header of a checkpoint.

    Raises:
        Refused: it is missing, truncated, damaged or of a kind not supported; the sentence has the numbers.
    """
    path = Path(path)
    try:
        if not path.is_file():
            raise Refused(f"{path.name} does not exist ({path}): pick another file or put it there.")
        size = path.stat().st_size
        with path.open("rb") as file:
            return read_safetensors(path, file, size)
    except OSError as error:
        raise Refused(f"{path.name} cannot be read ({error.strerror}): check the disk and its permissions.") from error
