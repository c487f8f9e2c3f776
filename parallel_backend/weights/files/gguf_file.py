"""The header of a GGUF file, read without mapping it (the gguf package's reader maps all of it).

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Types and their block sizes come from the package.
"""

from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import BinaryIO

import torch
from gguf import GGUF_DEFAULT_ALIGNMENT, GGUF_MAGIC, GGMLQuantizationType, GGUFValueType

from ...errors import Refused
from ..formats.gguf_blocks import BLOCK_TYPES
from ..formats.storage import PLAIN, Storage
from .entry import Checkpoint, Entry, check_overlap

MAGIC = struct.pack("<I", GGUF_MAGIC)
VERSIONS = (2, 3)

MAX_HEADER_BYTES = 64 * 2**20
"""Far above any image model's; a damaged file must not keep us reading."""

MAX_ITEMS = 1 << 20
"""Of tensors, of fields, and of the texts in one field."""

MAX_DIMS = 5
"""Of a convolution over frames, rows and columns."""

PLAIN_TYPES = {
    GGMLQuantizationType.F64: torch.float64,
    GGMLQuantizationType.F32: torch.float32,
    GGMLQuantizationType.F16: torch.float16,
    GGMLQuantizationType.BF16: torch.bfloat16,
}

TYPES = {
    int(kind): storage for kind, storage in [*((k, PLAIN[v]) for k, v in PLAIN_TYPES.items()), *BLOCK_TYPES.items()]
}

SIZES = {
    GGUFValueType.UINT8: 1,
    GGUFValueType.INT8: 1,
    GGUFValueType.BOOL: 1,
    GGUFValueType.UINT16: 2,
    GGUFValueType.INT16: 2,
    GGUFValueType.UINT32: 4,
    GGUFValueType.INT32: 4,
    GGUFValueType.FLOAT32: 4,
    GGUFValueType.UINT64: 8,
    GGUFValueType.INT64: 8,
    GGUFValueType.FLOAT64: 8,
}


def read_gguf(path: Path, file: BinaryIO, size: int) -> Checkpoint:
    """Read and check the header of an open GGUF file of `size` bytes.

    Raises:
        Refused: the file is truncated, damaged, or holds a type not supported; the sentence has the numbers.
    """
    fields = _Fields(file, min(size, MAX_HEADER_BYTES))
    try:
        return _read(path, fields, size)
    except _EndOfHeader:
        raise Refused(
            f"{path.name} is truncated or damaged: its header does not end within {fields.limit} bytes and the file has "
            f"{size}; download it again."
        ) from None
    except Refused:  # which is a ValueError
        raise
    except (ValueError, OverflowError) as error:
        raise Refused(f"{path.name} has a damaged header ({error}); download it again.") from None


def _read(path: Path, fields: _Fields, size: int) -> Checkpoint:
    fields.take(len(MAGIC))
    version = fields.integer("I")
    if version not in VERSIONS:
        raise Refused(f"{path.name} is GGUF version {version} and {VERSIONS[-1]} is supported: convert it again.")
    tensors, count = fields.count("Q"), fields.count("Q")
    alignment = GGUF_DEFAULT_ALIGNMENT
    metadata: dict[str, str] = {}
    for _ in range(count):
        name, kind = fields.text(), GGUFValueType(fields.integer("I"))
        value = fields.value(kind)
        if kind == GGUFValueType.STRING:
            metadata[name] = str(value)
        if name == "general.alignment" and isinstance(value, int):
            alignment = value
    if alignment < 1 or alignment & (alignment - 1):
        raise ValueError(f"alignment {alignment}")
    found = [_tensor(path, fields) for _ in range(tensors)]
    start = -(-fields.offset // alignment) * alignment
    entries = {name: Entry(storage, shape, start + offset, path) for name, storage, shape, offset in found}
    if len(entries) < len(found):
        raise ValueError("two tensors of one name")
    check_overlap(entries)
    end = max((entry.offset + entry.nbytes for entry in entries.values()), default=start)
    if end > size:
        raise Refused(f"{path.name} is truncated: it should have {end} bytes and has {size}; download it again.")
    return Checkpoint(path, entries, (path,), metadata)


def _tensor(path: Path, fields: _Fields) -> tuple[str, Storage, tuple[int, ...], int]:
    name, dims = fields.text(), fields.integer("I")
    if dims > MAX_DIMS:
        raise ValueError(f"tensor {name} has {dims} dimensions")
    shape = tuple(reversed([fields.integer("Q") for _ in range(dims)]))
    number, offset = fields.integer("I"), fields.integer("Q")
    storage = TYPES.get(number)
    if storage is None:
        known = {int(kind): kind.name for kind in GGMLQuantizationType}
        supported = ", ".join(kind.name for kind in TYPES.values())
        raise Refused(
            f"{path.name} holds {name} as {known.get(number, f'type {number}')}, which is not supported ({supported} "
            "are): choose another file."
        )
    if shape and shape[-1] % storage.values:
        raise ValueError(f"tensor {name} has rows of {shape[-1]} values in blocks of {storage.values}")
    if math.prod(shape) > 1 << 48:
        raise ValueError(f"tensor {name} has the shape {list(shape)}")
    return name, storage, shape, offset


class _EndOfHeader(Exception):
    """The header goes on past the limit."""


class _Fields:
    """Reads a header field by field, little-endian, and no further than `limit` bytes."""

    def __init__(self, file: BinaryIO, limit: int) -> None:
        self._file = file
        self.limit = limit
        self.offset = 0

    def take(self, nbytes: int) -> bytes:
        """The next bytes."""
        self.offset += nbytes
        if self.offset > self.limit:
            raise _EndOfHeader
        return self._file.read(nbytes)

    def integer(self, code: str) -> int:
        """The next unsigned integer: "I" of 4 bytes, "Q" of 8."""
        (value,) = struct.unpack(f"<{code}", self.take(struct.calcsize(code)))
        return int(value)

    def count(self, code: str) -> int:
        """The next integer, a number of things that follow."""
        value = self.integer(code)
        if value > MAX_ITEMS:
            raise ValueError(f"{value} items")
        return value

    def text(self) -> str:
        """The next text."""
        return self.take(self.integer("Q")).decode()

    def value(self, kind: GGUFValueType) -> object:
        """The next value; None for those that say nothing about the tensors."""
        if kind == GGUFValueType.STRING:
            return self.text()
        if kind == GGUFValueType.UINT32:
            return self.integer("I")
        if kind != GGUFValueType.ARRAY:
            self.take(SIZES[kind])
            return None
        of, count = GGUFValueType(self.integer("I")), self.integer("Q")
        if of == GGUFValueType.ARRAY:
            raise ValueError("an array of arrays")
        if of != GGUFValueType.STRING:
            self.take(SIZES[of] * count)
            return None
        if count > MAX_ITEMS:
            raise ValueError(f"an array of {count} texts")
        for _ in range(count):
            self.take(self.integer("Q"))
        return None
