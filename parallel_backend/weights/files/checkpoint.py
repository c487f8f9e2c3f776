"""The reader of checkpoints in users' formats. It reads headers and byte ranges, and never maps or reads a whole file."""

from __future__ import annotations

import os
from pathlib import Path

from ...errors import Refused
from .entry import Checkpoint, TensorEntry
from .safetensors_file import read_folder, read_safetensors

__all__ = ["Checkpoint", "TensorEntry", "read_header"]

PICKLES = (b"PK\x03\x04", b"\x80\x02", b"\x80\x04")
"""First bytes of torch.save's files, which are zip files, or bare pickles in older versions."""


def read_header(path: str | os.PathLike[str]) -> Checkpoint:
    """Read and check the header of a safetensors or GGUF file, or of a diffusers folder.

    Raises:
        Refused: the file is missing, truncated, damaged or of an unsupported kind. The message has the numbers.
    """
    path = Path(path)
    try:
        return read_folder(path, _read_file) if path.is_dir() else _read_file(path)
    except OSError as error:
        raise Refused(f"{path.name} cannot be read ({error.strerror}): check the disk and its permissions.") from error


def _read_file(path: Path) -> Checkpoint:
    if not path.is_file():
        raise Refused(f"{path.name} does not exist ({path}): pick another file or put it there.")
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(4)
        file.seek(0)
        if start == b"GGUF":
            from .gguf_file import read_gguf  # the gguf package takes a third of a second to import

            return read_gguf(path, file, size)
        if start.startswith(PICKLES):
            raise Refused(
                f"{path.name} is a PyTorch pickle, which is not supported (it can run code): choose a .safetensors or "
                ".gguf file, or a diffusers folder."
            )
        return read_safetensors(path, file, size)
