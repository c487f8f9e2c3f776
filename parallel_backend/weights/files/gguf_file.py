"""The reader of GGUF headers. It does not map the file (the gguf package's reader maps all of it).

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Types and their block sizes come from the package.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import BinaryIO

import torch
from gguf import GGUF_DEFAULT_ALIGNMENT, GGUF_MAGIC, GGMLQuantizationType, GGUFValueType

from ...errors import Refused
from ..formats import BLOCK_TYPES, PLAIN, Storage, unreadable
from .entry import Checkpoint, TensorEntry, check_overlap

MAGIC = struct.pack("<I", GGUF_MAGIC)
VERSIONS = (2, 3)

MAX_HEADER_BYTES = 64 * 2**20
"""Largest header that is read, far above that of any image model. A damaged file must not keep the reader busy."""

MAX_ITEMS = 1 << 20
"""Largest number of tensors, of fields, and of texts in one field."""

MAX_DIMS = 16
"""Largest number of dimensions, far above the five of a convolution over frames, rows and columns."""

ORIGINAL_SHAPE = "comfy.gguf.orig_shape."
"""Prefix of the field with a tensor's original shape, before the tensor's name.

The file has this field if the converter has folded the tensor to rows of 256 values.
"""

PART, PARTS = "split.no", "split.count"
"""Fields of a model that is split into several files: the number of this file, from 0 on, and the number of all files."""

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

INTEGERS = {
    GGUFValueType.UINT8: "B",
    GGUFValueType.INT8: "b",
    GGUFValueType.UINT16: "H",
    GGUFValueType.INT16: "h",
    GGUFValueType.UINT32: "I",
    GGUFValueType.INT32: "i",
    GGUFValueType.UINT64: "Q",
    GGUFValueType.INT64: "q",
}
"""Format character of struct for each integer type."""

SPLIT_NAME = re.compile(r"(-\d{5}-of-\d{5})?\.gguf$", re.IGNORECASE)
"""The end of the file name of a part."""

MAX_PARTS = 20
"""Largest number of parts that a message names."""


def read_gguf(path: Path, file: BinaryIO, size: int) -> Checkpoint:
    """Read and check the header of an open GGUF file of `size` bytes.

    Raises:
        Refused: the file is truncated, damaged, a part of a split model, or of an unsupported version. The message has the
            numbers.
    """
    fields = _Fields(file, min(size, MAX_HEADER_BYTES))
    try:
        return _read(path, fields, size)
    except _EndOfHeader:
        raise Refused(
            f"{path.name} is truncated or damaged: its header does not end within {fields.limit} bytes and the file has "
            f"{size}; download it again."
        ) from None
    except Refused:  # Refused is a ValueError too
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
    numbers: dict[str, object] = {}
    for _ in range(count):
        name, kind = fields.text(), GGUFValueType(fields.integer("I"))
        value = fields.value(kind)
        if kind == GGUFValueType.STRING:
            metadata[name] = str(value)
        elif name.startswith(ORIGINAL_SHAPE) or name in (PART, PARTS):
            numbers[name] = value
        if name == "general.alignment" and isinstance(value, int):
            alignment = value
    if alignment < 1 or alignment & (alignment - 1):
        raise ValueError(f"alignment {alignment}")
    _refuse_part(path, numbers.get(PART), numbers.get(PARTS))
    tensor_infos = [_tensor(fields) for _ in range(tensors)]
    start = -(-fields.offset // alignment) * alignment
    ends = dict(pairwise(sorted({size - start, *(tensor.offset for tensor in tensor_infos)})))
    entries = {}
    for tensor in tensor_infos:
        shape = _original(tensor, numbers.get(ORIGINAL_SHAPE + tensor.name))
        entries[tensor.name] = TensorEntry(_storage(tensor, ends), shape, start + tensor.offset, path)
    if len(entries) < len(tensor_infos):
        raise ValueError("two tensors of one name")
    check_overlap(entries)
    end = max((entry.offset + entry.nbytes for entry in entries.values()), default=start)
    if end > size:
        raise Refused(f"{path.name} is truncated: it should have {end} bytes and has {size}; download it again.")
    return Checkpoint(path, entries, (path,), metadata, drops_ones=True)


@dataclass(frozen=True)
class _Tensor:
    """The header's description of a tensor. `offset` counts from the start of all tensors' data."""

    name: str
    shape: tuple[int, ...]
    number: int
    offset: int


def _tensor(fields: _Fields) -> _Tensor:
    name, dims = fields.text(), fields.integer("I")
    if dims > MAX_DIMS:
        raise ValueError(f"tensor {name} has {dims} dimensions")
    shape = tuple(reversed([fields.integer("Q") for _ in range(dims)]))
    if math.prod(shape) > 1 << 48:
        raise ValueError(f"tensor {name} has the shape {list(shape)}")
    return _Tensor(name, shape, fields.integer("I"), fields.integer("Q"))


def _storage(tensor: _Tensor, ends: Mapping[int, int]) -> Storage:
    """Return the storage of a tensor's values.

    The storage covers all bytes up to the next tensor if the type is unknown, or if its blocks do not divide the values.

    Args:
        ends: offset at which bytes begin -> offset at which they end.
    """
    values, storage = math.prod(tensor.shape), TYPES.get(tensor.number)
    if storage is not None and values % storage.values == 0:
        return storage
    kinds = {int(kind): kind.name for kind in GGMLQuantizationType}
    name = kinds.get(tensor.number, f"type {tensor.number}")
    return unreadable(name, values, max(0, ends.get(tensor.offset, tensor.offset) - tensor.offset))


def _original(tensor: _Tensor, field: object) -> tuple[int, ...]:
    """Return a tensor's shape before it was folded, if a field of the header has that shape."""
    if isinstance(field, list) and min(field, default=0) > 0 and math.prod(field) == math.prod(tensor.shape):
        return tuple(field)
    return tensor.shape


def _refuse_part(path: Path, number: object, count: object) -> None:
    """Refuse a file that is one of several parts of a model, and name the other parts."""
    if not isinstance(number, int) or not isinstance(count, int) or count < 2:
        return
    stem = SPLIT_NAME.sub("", path.name)
    other_files = [
        f"{stem}-{each + 1:05d}-of-{count:05d}.gguf" for each in range(min(count, MAX_PARTS)) if each != number
    ]
    missing = [name for name in other_files if not (path.parent / name).is_file()]
    where = f"missing in its folder: {', '.join(missing)}" if missing else "in its folder"
    raise Refused(
        f"{path.name} is part {number + 1} of {count} of a model (the others are {', '.join(other_files)}; {where}): join them "
        "with llama.cpp's llama-gguf-split --merge and choose the joined file."
    )


class _EndOfHeader(Exception):
    """The error of a header that continues after the limit."""


class _Fields:
    """A reader of a header's fields, little-endian and in order. It reads no further than `limit` bytes."""

    def __init__(self, file: BinaryIO, limit: int) -> None:
        self._file = file
        self.limit = limit
        self.offset = 0

    def take(self, nbytes: int) -> bytes:
        """Return the next bytes."""
        self.offset += nbytes
        if self.offset > self.limit:
            raise _EndOfHeader
        return self._file.read(nbytes)

    def integer(self, code: str) -> int:
        """Return the next unsigned integer: 4 bytes for the code "I", 8 bytes for "Q"."""
        (value,) = struct.unpack(f"<{code}", self.take(struct.calcsize(code)))
        return int(value)

    def count(self, code: str) -> int:
        """Return the next integer, which is the number of items that follow. Raises ValueError above MAX_ITEMS."""
        value = self.integer(code)
        if value > MAX_ITEMS:
            raise ValueError(f"{value} items")
        return value

    def text(self) -> str:
        """Return the next text."""
        return self.take(self.integer("Q")).decode()

    def value(self, kind: GGUFValueType) -> object:
        """Return the next value, or None for a value that says nothing about the tensors.

        Raises:
            ValueError: the value is an array of arrays, or an array of more than MAX_ITEMS texts.
        """
        if kind == GGUFValueType.STRING:
            return self.text()
        if kind in INTEGERS:
            return self._integers(kind, 1)[0]
        if kind != GGUFValueType.ARRAY:
            self.take(SIZES[kind])
            return None
        of, count = GGUFValueType(self.integer("I")), self.integer("Q")
        if of == GGUFValueType.ARRAY:
            raise ValueError("an array of arrays")
        if of in INTEGERS and count <= MAX_DIMS:
            return self._integers(of, count)
        if of != GGUFValueType.STRING:
            self.take(SIZES[of] * count)
            return None
        if count > MAX_ITEMS:
            raise ValueError(f"an array of {count} texts")
        for _ in range(count):
            self.take(self.integer("Q"))
        return None

    def _integers(self, kind: GGUFValueType, count: int) -> list[int]:
        return list(struct.unpack(f"<{count}{INTEGERS[kind]}", self.take(SIZES[kind] * count)))
