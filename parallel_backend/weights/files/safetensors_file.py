"""The reader of safetensors headers: 8 bytes length, JSON, tensor bytes (https://github.com/huggingface/safetensors)."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from ...errors import Refused
from ..formats import PLAIN, unreadable
from .entry import Checkpoint, TensorEntry, check_overlap

MAX_HEADER_BYTES = 100 * 2**20
"""Largest size of a header, which the format itself sets."""

TYPES = {storage.name: storage for storage in PLAIN.values()}


def read_safetensors(path: Path, file: BinaryIO, size: int) -> Checkpoint:
    """Read and check the header of an open safetensors file of `size` bytes.

    Raises:
        Refused: the file is truncated, damaged or no safetensors file. The message has the numbers.
    """
    start = file.read(8)
    length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
    if not 2 <= length <= MAX_HEADER_BYTES:
        raise Refused(
            f"{path.name} ({size} bytes) is neither a safetensors nor a GGUF file: download it again, or choose "
            "another file."
        )
    if 8 + length > size:
        raise Refused(
            f"{path.name} is truncated: its header takes {8 + length} bytes and the file has {size}; download it again."
        )
    try:
        header = json.loads(file.read(length))
        assert isinstance(header, dict)
        metadata = {str(name): str(value) for name, value in header.pop("__metadata__", {}).items()}
        entries = {name: _entry(path, name, value, 8 + length) for name, value in header.items()}
        check_overlap(entries)
    except Refused:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, AssertionError, RecursionError) as error:
        raise Refused(
            f"{path.name} has a damaged header ({error or 'no table of tensors'}); download it again."
        ) from None
    end = max((entry.offset + entry.nbytes for entry in entries.values()), default=8 + length)
    if end > size:
        raise Refused(f"{path.name} is truncated: it should have {end} bytes and has {size}; download it again.")
    return Checkpoint(path, entries, (path,), metadata)


def _entry(path: Path, name: str, value: Mapping[str, Any], data_start: int) -> TensorEntry:
    shape = tuple(value["shape"])
    if not all(type(n) is int and n >= 0 for n in shape):
        raise ValueError(f"tensor {name} has the shape {shape}")
    begin, end = value["data_offsets"]
    if type(begin) is not int or type(end) is not int:
        raise ValueError(f"tensor {name} lies at {begin} to {end}")
    storage = TYPES.get(value["dtype"]) or unreadable(str(value["dtype"]), math.prod(shape), end - begin)
    entry = TensorEntry(storage, shape, data_start + begin, path)
    if begin < 0 or end - begin != entry.nbytes:
        raise ValueError(f"tensor {name} has {end - begin} bytes for {entry.nbytes}")
    return entry


WEIGHTS = "diffusion_pytorch_model.safetensors"
INDEX = f"{WEIGHTS}.index.json"
TRANSFORMER = "transformer"
"""Folder of the denoiser inside the folder of a diffusers pipeline."""

MAX_INDEX_BYTES = 100 * 2**20


def is_diffusers_folder(path: Path) -> bool:
    """Return True if a folder has weights that `read_folder` reads."""
    return any((folder / name).is_file() for folder in (path, path / TRANSFORMER) for name in (WEIGHTS, INDEX))


def read_folder(path: Path, read_file: Callable[[Path], Checkpoint]) -> Checkpoint:
    """Read the headers of the denoiser in a diffusers folder.

    Raises:
        Refused: there are no weights, or the index is damaged or names a file that is missing or lacks a tensor.
    """
    folder = path / TRANSFORMER if is_diffusers_folder(path / TRANSFORMER) else path
    if not is_diffusers_folder(folder):
        raise Refused(
            f"the folder {path.name} has no {WEIGHTS} and no {INDEX}: choose the folder of a diffusers transformer."
        )
    index = folder / INDEX
    if not index.is_file():
        part = read_file(folder / WEIGHTS)
        return Checkpoint(path, part.entries, part.files, part.metadata)
    weight_map = _read_index(path, index)
    parts = {}
    for name in sorted(set(weight_map.values())):
        if Path(name).name != name:
            raise Refused(f"{INDEX} of {path.name} names {name}, which is outside the folder: download it again.")
        if not (folder / name).is_file():
            raise Refused(f"{path.name} lacks the file {name} that its index names: download it into {folder}.")
        parts[name] = read_file(folder / name)
    for tensor, name in weight_map.items():
        if tensor not in parts[name].entries:
            raise Refused(f"{name} of {path.name} lacks the tensor {tensor} that the index names: download it again.")
    entries = {tensor: parts[name].entries[tensor] for tensor, name in weight_map.items()}
    return Checkpoint(path, entries, tuple(folder / name for name in parts))


def _read_index(path: Path, index: Path) -> dict[str, str]:
    try:
        if index.stat().st_size > MAX_INDEX_BYTES:
            raise ValueError(f"{index.stat().st_size} bytes")
        weight_map = json.loads(index.read_bytes())["weight_map"]
        if not weight_map or not all(isinstance(name, str) for name in weight_map.values()):
            raise ValueError("no table of files")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Refused(f"{INDEX} of {path.name} is damaged ({error}); download it again.") from None
    return dict(weight_map)
