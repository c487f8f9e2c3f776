"""Safetensors files read by header and byte range: never mapped, never read whole.

Format: https://github.com/huggingface/safetensors (8 bytes length, JSON header, tensor bytes).
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import Refused

MAX_HEADER_BYTES = 100 * 2**20
"""The format's own limit on the header."""

PIECE_BYTES = 16 * 2**20
"""Bytes read at a time, so that the host memory used while loading stays small."""

DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True)
class Entry:
    """One tensor of a file: where its bytes lie and what they are."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        """Bytes of data in the file."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Checkpoint:
    """A file's header: its tensors by name. No tensor data is held."""

    path: Path
    entries: Mapping[str, Entry]

    def select(self, prefix: str, rename: Callable[[str], str]) -> Checkpoint:
        """Only the tensors whose names begin with `prefix`, without it and renamed."""
        return Checkpoint(
            self.path,
            {rename(name.removeprefix(prefix)): e for name, e in self.entries.items() if name.startswith(prefix)},
        )

    def meta_tensors(self) -> dict[str, Tensor]:
        """The tensors on the meta device: shapes and dtypes without data."""
        return {
            name: torch.empty(entry.shape, dtype=entry.dtype, device="meta") for name, entry in self.entries.items()
        }


def read_header(path: str | os.PathLike[str]) -> Checkpoint:
    """Read and check the header of a safetensors file.

    Raises:
        Refused: the file is missing, truncated or not a safetensors file; the sentence has the numbers.
    """
    path = Path(path)
    if not path.is_file():
        raise Refused(f"{path.name} does not exist ({path}): pick another file or put it there.")
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if not 2 <= length <= MAX_HEADER_BYTES:
            raise Refused(f"{path.name} ({size} bytes) is not a safetensors file: choose a .safetensors checkpoint.")
        if 8 + length > size:
            raise Refused(
                f"{path.name} is truncated: its header takes {8 + length} bytes and the file has {size}; download it again."
            )
        raw = file.read(length)
    try:
        header = json.loads(raw)
        assert isinstance(header, dict)
        tables = {name: value for name, value in header.items() if name != "__metadata__"}
        entries = {name: _entry(path, name, value, 8 + length) for name, value in tables.items()}
    except Refused:
        raise
    except (ValueError, KeyError, TypeError, AssertionError, RecursionError) as error:
        raise Refused(
            f"{path.name} has a damaged header ({error or 'no table of tensors'}); download it again."
        ) from None
    end = max((entry.offset + entry.nbytes for entry in entries.values()), default=8 + length)
    if end > size:
        raise Refused(f"{path.name} is truncated: it should have {end} bytes and has {size}; download it again.")
    return Checkpoint(path, entries)


def _entry(path: Path, name: str, value: Mapping[str, Any], data_start: int) -> Entry:
    dtype = DTYPES.get(value["dtype"])
    if dtype is None:
        raise Refused(
            f"{path.name} holds {name} as {value['dtype']}, a type not supported ({', '.join(DTYPES)} are): "
            "choose another file."
        )
    shape = tuple(value["shape"])
    if not all(isinstance(n, int) and n >= 0 for n in shape):
        raise ValueError(f"tensor {name} has the shape {shape}")
    begin, end = value["data_offsets"]
    entry = Entry(dtype, shape, data_start + begin)
    if begin < 0 or end - begin != entry.nbytes:
        raise ValueError(f"tensor {name} has {end - begin} bytes for {entry.nbytes}")
    return entry


class CheckpointReader:
    """Reads rows of tensors from an open file in bounded pieces.

    Args:
        checkpoint: the file's header.
        on_bytes: called with the number of bytes after each piece.
    """

    def __init__(self, checkpoint: Checkpoint, on_bytes: Callable[[int], None]) -> None:
        self._checkpoint = checkpoint
        self._on_bytes = on_bytes
        self._fd = os.open(checkpoint.path, os.O_RDONLY | os.O_CLOEXEC)
        self._buffer = torch.empty(PIECE_BYTES, dtype=torch.uint8)

    def __enter__(self) -> CheckpointReader:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)

    def read_rows(self, name: str, rows: slice, into: Tensor) -> None:
        """Fill `into`, a contiguous tensor of any dtype and device, with rows of a tensor (dim 0).

        Raises:
            OSError: the file ends early or cannot be read.
        """
        entry = self._checkpoint.entries[name]
        per_row = math.prod(entry.shape[1:])
        offset = entry.offset + rows.start * per_row * entry.dtype.itemsize
        flat = into.view(-1)
        assert into.is_contiguous() and flat.numel() == (rows.stop - rows.start) * per_row
        step = PIECE_BYTES // entry.dtype.itemsize
        for begin in range(0, flat.numel(), step):
            count = min(step, flat.numel() - begin)
            piece = self._read(offset + begin * entry.dtype.itemsize, count * entry.dtype.itemsize)
            flat[begin : begin + count].copy_(piece.view(entry.dtype))

    def _read(self, offset: int, nbytes: int) -> Tensor:
        view = memoryview(self._buffer.numpy().data)[:nbytes]
        done = 0
        while done < nbytes:
            count = os.preadv(self._fd, [view[done:]], offset + done)
            if count == 0:
                raise OSError(f"{self._checkpoint.path.name} ended at byte {offset + done} while it was being read")
            done += count
        self._on_bytes(nbytes)
        return self._buffer[:nbytes]
