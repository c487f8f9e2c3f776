"""Filling a module from a checkpoint, parameter by parameter, by byte range."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from .entry import Checkpoint, Entry
from .keymap import KeyMap, Piece
from .layers import PackedLinear
from .reading import Neighbours, Want, Watch, read_wanted
from .storage import FLOAT8


@torch.no_grad()
def load_weights(
    module: nn.Module,
    checkpoint: Checkpoint,
    keys: KeyMap,
    dtype: torch.dtype,
    neighbours: Neighbours,
    watch: Watch,
    only: Collection[str] | None = None,
    exact: Collection[str] = (),
) -> None:
    """Fill every parameter of a materialised module, or only those named. A collective of all ranks.

    Args:
        module: shaped by `shape_parameters`; its parameters, or its shards of them, are on their device.
        checkpoint: its headers, names without prefix.
        keys: which rows of which tensors make each parameter.
        dtype, exact: as given to `shape_parameters`.

    Raises:
        Refused, Cancelled: as `read_wanted` does.
    """
    files = {file: number for number, file in enumerate(checkpoint.files)}
    wants: list[Want] = []
    for name, child in module.named_modules():
        for key, parameter in child.named_parameters(recurse=False):
            scale = isinstance(child, PackedLinear) and key == "weight_scale"
            full_name = f"{name}.{key}" if name else key
            if only is not None and full_name not in only:
                continue
            source = f"{name}.weight" if scale else full_name
            local, held = local_rows(parameter)
            for entry, rows, into in _rows(checkpoint, keys[source], held, local):
                if scale:
                    assert entry.scale is not None
                    wants.append(_scale(entry.scale, rows, into, files))
                elif isinstance(child, PackedLinear) and key == "weight":
                    kind = child.storage.dtype
                    wants.append(wanted_rows(entry, rows, into.view(kind or torch.uint8), None, files))
                else:
                    through = dtype if dtype in FLOAT8 and full_name not in exact else None
                    wants.append(wanted_rows(entry, rows, into, through, files))
    read_wanted(checkpoint.files, [want for want in wants if want.stop > want.start], neighbours, watch)


def _rows(
    checkpoint: Checkpoint, pieces: tuple[Piece, ...], held: slice, local: Tensor
) -> Iterator[tuple[Entry, slice, Tensor]]:
    """Of the rows that are held: which rows of which of the file's tensors they are, and where they go."""
    offset = 0
    for piece in pieces:
        for entry, start, stop in checkpoint.entries[piece.name].runs(piece.start, piece.stop):
            begin, end = max(offset, held.start), min(offset + stop - start, held.stop)
            if begin < end:
                rows = slice(start + begin - offset, start + end - offset)
                yield entry, rows, local[begin - held.start : end - held.start]
            offset += stop - start


def wanted_rows(
    entry: Entry, rows: slice, into: Tensor, through: torch.dtype | None, files: Mapping[Path, int]
) -> Want:
    """Rows of a tensor: blocks byte by byte into uint8, values converted, `through` a type that rounds them if given."""
    flat = into.view(-1)
    kind = entry.dtype or torch.uint8
    start = entry.offset + rows.start * entry.row_bytes

    def put(offset: int, data: Tensor) -> None:
        values = _aligned(data, kind).view(kind)
        first = offset // kind.itemsize
        target = flat[first : first + values.numel()]
        target.copy_(values if through is None else values.to(target.device).to(through))

    return Want(files[entry.file], start, start + (rows.stop - rows.start) * entry.row_bytes, put)


def _scale(entry: Entry, rows: slice, into: Tensor, files: Mapping[Path, int]) -> Want:
    """The factors of rows, of which the file has one for all or one for each."""
    assert entry.dtype is not None
    one = entry.nbytes == entry.dtype.itemsize
    kind = entry.dtype
    start = entry.offset + (0 if one else rows.start * kind.itemsize)
    flat = into.view(-1)

    def put(offset: int, data: Tensor) -> None:
        values = _aligned(data, kind).view(kind)
        first = offset // kind.itemsize
        (flat if one else flat[first : first + values.numel()]).copy_(values)

    return Want(files[entry.file], start, start + kind.itemsize * (1 if one else rows.stop - rows.start), put)


def _aligned(data: Tensor, kind: torch.dtype) -> Tensor:
    return data.clone() if data.storage_offset() % kind.itemsize else data


def local_rows(parameter: nn.Parameter) -> tuple[Tensor, slice]:
    """What this rank holds of a parameter and which rows that is: all, or an FSDP shard (cut as torch.chunk does)."""
    if not isinstance(parameter.data, DTensor):
        return parameter.data, slice(0, parameter.shape[0])
    local = parameter.data.to_local()
    mesh = parameter.data.device_mesh
    chunk = -(-parameter.shape[0] // mesh.size())
    start = min(mesh.get_local_rank() * chunk, parameter.shape[0])
    return local, slice(start, start + local.shape[0])
