"""The types in which a device holds a module's parameters: the dtype chosen for weights, or quantised as in the file."""

from __future__ import annotations

import math
from collections import Counter
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
"""Bytes that a value takes while its block is unpacked: the value in fp32, and the last operands that it is made of."""

WIDE = torch.bfloat16
"""Dtype in which vectors are held if the weights are to be fp8. It is wide enough for every fp8 value."""


def storage_of(entry: TensorEntry, dtype: torch.dtype) -> Storage:
    """Return the storage in which a tensor of a file is held if `dtype` is chosen for the weights.

    Quantised tensors stay as they are. A plain fp8 tensor may become the other fp8 type. Vectors are never held quantised, only
    rounded (see `shape_parameters`). Blocks that no linear layer could multiply by are expanded while they are loaded.
    """
    if entry.dtype is None and not in_rows(entry):
        return PLAIN[widened(dtype)]
    swap = entry.dtype in FLOAT8 and entry.scale is None and dtype in FLOAT8
    return entry.storage if entry.as_stored or (entry.storage.quantised and not swap) else PLAIN[dtype]


def widened(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which vectors are held if `dtype` is chosen for the weights.

    For fp8 it is a wider dtype, wide enough also for the results of adapters.
    """
    return WIDE if dtype in FLOAT8 else dtype


def is_merged(storage: Storage, scaled: bool, dtype: torch.dtype) -> bool:
    """Return True if adapters are merged into a matrix, as ComfyUI does. Otherwise they are applied at each expansion.

    They are not merged into blocks and scaled fp8, nor into fp8 that ComfyUI would hold in a wider dtype.

    Args:
        storage: the storage in which the matrix is held.
        scaled: True if the matrix has a scale.
        dtype: the dtype chosen for the weights.
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
    """Return the number of bytes of all tensors of a checkpoint once they are held."""
    total = 0
    for entry in checkpoint.entries.values():
        storage = storage_of(entry, dtype)
        if len(entry.shape) != 2 and storage.quantised and not entry.as_stored:
            storage = PLAIN[widened(dtype)]
        scales = 4 * entry.shape[0] if entry.scale else 0
        total += math.prod(entry.shape) // storage.values * storage.nbytes + scales
    return total


MULTIPLIED = {
    torch.float8_e4m3fn: "fp8_fast",
    torch.float8_e5m2: "fp8_fast",
    torch.int8: "int8",
    torch.uint8: "nvfp4",
}
"""The key of `Device.quantised` for weights that are multiplied without expansion, by the dtype of their stored values."""


@dataclass(frozen=True)
class QuantisedMatrices:
    """The costs of a model's quantised matrices, which are expanded where they are used, or multiplied as they are stored.

    Attributes:
        moved: bytes that are read and written if all matrices that are expanded are expanded once.
        largest: bytes that the largest matrix takes while it is expanded.
        multiplied: the dtype of those that are multiplied without expansion, a value of MULTIPLIED; empty if there are none.
    """

    moved: float
    largest: int
    multiplied: str


def quantised_matrices(checkpoint: Checkpoint, dtype: torch.dtype, element: int, fast_fp8: bool) -> QuantisedMatrices:
    """Return the costs of a checkpoint's quantised matrices.

    Matrices that ComfyUI's own operations multiply by are not expanded. With `fast_fp8`, plain fp8_e4m3fn is not expanded
    either.

    Args:
        dtype: the dtype chosen for the weights.
        element: bytes of an expanded value.
        fast_fp8: True if matrix products are in fp8.
    """
    moved, largest, multiplied = 0.0, 0, Counter[str]()
    for entry in checkpoint.entries.values():
        storage, values = storage_of(entry, dtype), math.prod(entry.shape)
        in_fp8 = fast_fp8 and storage.dtype == torch.float8_e4m3fn and entry.scale is None and len(entry.shape) == 2
        if (entry.as_stored or in_fp8) and storage.dtype in MULTIPLIED:
            multiplied[MULTIPLIED[storage.dtype]] += values
        elif len(entry.shape) == 2 and storage.quantised and not entry.as_stored:
            moved += values * expansion_of(storage.nbytes / storage.values, element, storage.unpack is not None)
            largest = max(largest, expanding_bytes(storage, values, element))
    return QuantisedMatrices(moved, largest, next((name for name, _ in multiplied.most_common(1)), ""))


def expanding_bytes(storage: Storage, values: int, element: int) -> int:
    """Return the bytes that `values` stored values take while they are expanded to values of `element` bytes."""
    unpacked = 0 if storage.unpack is None else min(values, EXPAND_VALUES)
    return values * element + UNPACKED * unpacked


def packed_starts(checkpoint: Checkpoint, keys: KeyMap, dtype: torch.dtype, names: KeyMap) -> dict[str, list[int]]:
    """Return, for each matrix that adapters are not merged into, the rows at which its layers begin.

    Args:
        dtype: the dtype chosen for the weights.
        names: a key map with the keys of `keys`. Its tensor names are the keys of the result.
    """
    starts: dict[str, list[int]] = {}
    for parameter, piece in keys.items():
        entry = first_entry(checkpoint, piece)
        if len(entry.shape) == 2 and not is_merged(storage_of(entry, dtype), entry.scale is not None, dtype):
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
    """Give the parameters of a module on the meta device the types in which they are held.

    Linear layers whose weight is held quantised become PackedLinear. Other parameters get `dtype`, or WIDE if `dtype` is fp8
    (`widened`). Parameters named in `exact` get the dtype named there. Parts of quantised weights keep their dtypes.

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
            storage = storage_of(entry, dtype)
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
    """Return the tensor of the file with which a parameter begins."""
    entry, _, _ = next(checkpoint.entries[piece.name].runs(piece.start, piece.stop))
    return entry
