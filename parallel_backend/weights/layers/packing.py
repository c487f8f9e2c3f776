"""How the parameters of a module are held on the device: in the compute-side dtype, or quantised as in the file."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import nn

from ...errors import Refused
from ...plan.predict.profiles import expansion_of
from ..files.entry import Checkpoint, TensorEntry
from ..files.keymap import KeyMap, Piece
from ..formats import EXPAND_VALUES, FLOAT8, PLAIN, Storage
from .cast import pack
from .quantised import QuantisedParts

UNPACKED = 8
"""Bytes that a value takes while its block is unpacked: in fp32, and of what it is made in the end."""

WIDE = torch.bfloat16
"""What vectors are held in where fp8 is wished for: it is wide enough for every fp8 value."""


def held_as(entry: TensorEntry, dtype: torch.dtype) -> Storage:
    """How a tensor of a file is held where `dtype` is wished for: quantised tensors stay as they are.

    A plain fp8 tensor may become the other fp8 type. Vectors are never held quantised, only rounded (see `shape`). Blocks are
    expanded while they are loaded where no linear layer could multiply by them.
    """
    if entry.dtype is None and not in_rows(entry):
        return PLAIN[widened(dtype)]
    swap = entry.dtype in FLOAT8 and entry.scale is None and dtype in FLOAT8
    return entry.storage if entry.as_stored or (entry.storage.quantised and not swap) else PLAIN[dtype]


def widened(dtype: torch.dtype) -> torch.dtype:
    """What vectors of fp8 are held in where `dtype` is wished for: wide enough for what adapters make of them too."""
    return WIDE if dtype in FLOAT8 else dtype


def is_merged(storage: Storage, scaled: bool, dtype: torch.dtype) -> bool:
    """Whether adapters are merged into a matrix that is held so where `dtype` is wished for, as ComfyUI does.

    Not into blocks and scaled fp8, nor into fp8 that ComfyUI would hold in a wider type: they are applied at each expansion.
    """
    return not storage.quantised or (storage.dtype == dtype and not scaled)


def can_be_held(entry: TensorEntry) -> bool:
    """Return True if this pack can hold a tensor in its file's format.

    Its type must be known, and a tensor with a scale must have one or two dimensions.
    """
    return entry.storage.readable and (len(entry.shape) <= 2 or entry.scale is None)


def in_rows(entry: TensorEntry) -> bool:
    """Return True if a block-quantised tensor is a matrix whose rows are whole numbers of blocks."""
    return len(entry.shape) == 2 and entry.shape[1] % entry.storage.values == 0


def resident_bytes(checkpoint: Checkpoint, dtype: torch.dtype) -> int:
    """Bytes of all tensors of a checkpoint once held."""
    total = 0
    for entry in checkpoint.entries.values():
        storage = held_as(entry, dtype)
        if len(entry.shape) != 2 and storage.quantised and not entry.as_stored:
            storage = PLAIN[widened(dtype)]
        scales = 4 * entry.shape[0] if entry.scale else 0
        total += math.prod(entry.shape) // storage.values * storage.nbytes + scales
    return total


@dataclass(frozen=True)
class Expanded:
    """What it takes to expand the matrices that are held quantised, each where it is used.

    `moved` bytes are read and written where all of them are expanded once; `largest` is what one takes for that time.
    """

    moved: float
    largest: int


def expanded_bytes(checkpoint: Checkpoint, dtype: torch.dtype, element: int, fast_fp8: bool) -> Expanded:
    """Of a checkpoint's, to values of `element` bytes.

    Those that ComfyUI's own operations multiply by are not expanded; with `fast_fp8` neither is plain fp8_e4m3fn.
    """
    moved, largest = 0.0, 0
    for entry in checkpoint.entries.values():
        storage = held_as(entry, dtype)
        as_it_is = fast_fp8 and storage.dtype == torch.float8_e4m3fn and entry.scale is None
        if len(entry.shape) == 2 and storage.quantised and not entry.as_stored and not as_it_is:
            values = math.prod(entry.shape)
            moved += values * expansion_of(storage.nbytes / storage.values, element, storage.unpack is not None)
            largest = max(largest, expanding_bytes(storage, values, element))
    return Expanded(moved, largest)


def expanding_bytes(storage: Storage, values: int, element: int) -> int:
    """What so many stored values take while they are expanded to values of `element` bytes."""
    unpacked = 0 if storage.unpack is None else min(values, EXPAND_VALUES)
    return values * element + UNPACKED * unpacked


def packed_starts(checkpoint: Checkpoint, keys: KeyMap, dtype: torch.dtype, names: KeyMap) -> dict[str, list[int]]:
    """At which rows the layers begin as which a matrix is held that adapters are not merged into, by its name in `names`, which
    has the keys of `keys`."""
    starts: dict[str, list[int]] = {}
    for parameter, piece in keys.items():
        entry = first_entry(checkpoint, piece)
        if len(entry.shape) == 2 and not is_merged(held_as(entry, dtype), entry.scale is not None, dtype):
            named = names[parameter]
            starts.setdefault(named.name, []).append(named.start)
    return starts


def shape_parameters(
    module: nn.Module,
    checkpoint: Checkpoint,
    keys: KeyMap,
    dtype: torch.dtype,
    exact: Mapping[str, torch.dtype] = MappingProxyType({}),
) -> None:
    """Give the parameters of a module on the meta device the types they are held in.

    Linear layers whose weight is held quantised become PackedLinear. Other parameters become `dtype`, or WIDE where
    `dtype` is fp8 (`widened`); those named in `exact` have the type named there. Parts of quantised weights have their types.

    Raises:
        Refused: a tensor that no linear layer multiplies by is stored in blocks.
    """
    for name, child in list(module.named_modules()):
        if isinstance(child, QuantisedParts):
            continue
        for key in [key for key, _ in child.named_parameters(recurse=False)]:
            parameter = child.get_parameter(key)
            full_name = f"{name}.{key}" if name else key
            if full_name in exact:
                child.register_parameter(key, nn.Parameter(parameter.to(exact[full_name]), requires_grad=False))
                continue
            piece = keys[full_name]
            entry = first_entry(checkpoint, piece)
            storage = held_as(entry, dtype)
            if storage.quantised and isinstance(child, nn.Linear) and key == "weight":
                pack(child, storage, entry.scale is not None)
                continue
            if storage.dtype is None:
                raise Refused(
                    f"{checkpoint.path.name} holds {piece.name} as {storage.name}, which is "
                    "supported for linear layers only: choose another file."
                )
            parameter_dtype = widened(dtype) if storage.quantised else storage.dtype
            child.register_parameter(key, nn.Parameter(parameter.to(parameter_dtype), requires_grad=False))


def first_entry(checkpoint: Checkpoint, piece: Piece) -> TensorEntry:
    """Return the tensor of the file that a parameter begins with."""
    entry, _, _ = next(checkpoint.entries[piece.name].runs(piece.start, piece.stop))
    return entry
