"""Loads a module's parameters from a checkpoint, one by one and by byte range."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from ..files.entry import Checkpoint, TensorEntry
from ..files.keymap import KeyMap, Piece
from ..formats import FLOAT8
from ..layers.cast import PackedLinear
from ..layers.quantised import QuantisedParts
from ..stores.store import ParameterRun, WeightStore
from .reading import Neighbours, WantedRange, Watch, read_ranges


@dataclass(frozen=True)
class WeightSource:
    """The source of a module's weights.

    Attributes:
        checkpoint: the headers, with names without prefix.
        keys: the rows of tensors that make each parameter.
        dtype, exact: as given to `shape_parameters`.
    """

    checkpoint: Checkpoint
    keys: KeyMap
    dtype: torch.dtype
    exact: Collection[str] = ()


@torch.no_grad()
def load_weights(
    module: nn.Module,
    store: WeightStore,
    source: WeightSource,
    neighbours: Neighbours,
    watch: Watch,
    only: Collection[str] | None = None,
) -> None:
    """Fill every parameter of a materialised module, or only the named ones. This is a collective of all ranks.

    Args:
        module: shaped by `shape_parameters`.
        store: the store of the module's weights. This rank fills its runs of the parameters.

    Raises:
        Refused, Cancelled: as `read_ranges` does.
    """
    checkpoint, dtype = source.checkpoint, source.dtype
    files = {file: number for number, file in enumerate(checkpoint.files)}
    wants: list[WantedRange] = []
    for name, child in module.named_modules():
        for key, parameter in child.named_parameters(recurse=False):
            scale = isinstance(child, PackedLinear) and key == "weight_scale"
            full_name = f"{name}.{key}" if name else key
            if only is not None and full_name not in only:
                continue
            mapped = f"{name}.weight" if scale else full_name
            run, width = store.run(full_name), parameter.numel() // parameter.shape[:1].numel()
            rounded = dtype in FLOAT8 and full_name not in source.exact and not isinstance(child, QuantisedParts)
            through = dtype if rounded else None
            if isinstance(child, PackedLinear) and key == "weight":
                run, through = ParameterRun(run.values.view(child.storage.dtype or torch.uint8), run.start), None
            for entry, first, into in _runs(checkpoint, source.keys[mapped], run, width):
                if scale:
                    assert entry.scale is not None
                    wants.append(_scale(entry.scale, first, into, files))
                else:
                    wants.append(want_of(entry, first, into, through, files))
    read_ranges(checkpoint.files, [want for want in wants if want.stop > want.start], neighbours, watch)


def _runs(
    checkpoint: Checkpoint, piece: Piece, run: ParameterRun, width: int
) -> Iterator[tuple[TensorEntry, int, Tensor]]:
    """Yield the sources of a run of a parameter whose rows have `width` elements.

    Yields:
        A tensor of the file, the index of its first element to read, and the part of the run that the elements go to.
    """
    offset = 0
    for entry, start, stop in checkpoint.entries[piece.name].runs(piece.start, piece.stop):
        end = offset + (stop - start) * width
        first, last = max(offset, run.start), min(end, run.stop)
        if first < last:
            yield entry, start * width + first - offset, run.values[first - run.start : last - run.start]
        offset = end


def want_of(
    entry: TensorEntry, first: int, into: Tensor, through: torch.dtype | None, files: Mapping[Path, int]
) -> WantedRange:
    """Return the WantedRange of the elements from `first` on of a tensor. They fill `into`, which is flat.

    Plain values are converted. If `through` is given, they are rounded to that dtype first. Blocks are expanded and converted
    if `into` has a float dtype. Otherwise the elements are bytes of the blocks, and are copied unchanged.
    """
    if entry.dtype is None and into.dtype.is_floating_point:
        return _expanded(entry, first, into, through, files)
    kind = entry.dtype or torch.uint8
    start = entry.offset + first * kind.itemsize

    def put(offset: int, data: Tensor) -> None:
        values = _aligned(data, kind).view(kind)
        begin = offset // kind.itemsize
        target = into[begin : begin + values.numel()]
        target.copy_(values if through is None else values.to(target.device).to(through))

    return WantedRange(files[entry.file], start, start + into.numel() * kind.itemsize, put)


def _expanded(
    entry: TensorEntry, first: int, into: Tensor, through: torch.dtype | None, files: Mapping[Path, int]
) -> WantedRange:
    """Return the WantedRange of values in blocks. It gathers the blocks and expands them when the last block has arrived."""
    storage = entry.storage
    begin, end = first // storage.values, -(-(first + into.numel()) // storage.values)
    skipped = first - begin * storage.values
    nbytes = (end - begin) * storage.nbytes
    gathered: list[Tensor] = []
    remaining = nbytes

    def put(offset: int, data: Tensor) -> None:
        nonlocal remaining
        if not gathered:
            gathered.append(torch.empty(nbytes, dtype=torch.uint8, device=data.device))
        gathered[0][offset : offset + data.numel()] = data
        remaining -= data.numel()
        if remaining == 0:
            values = storage.expand(gathered.pop().view(1, -1), torch.float32).view(-1)[skipped:][: into.numel()]
            into.copy_(values if through is None else values.to(into.device).to(through))

    start = entry.offset + begin * storage.nbytes
    return WantedRange(files[entry.file], start, start + nbytes, put)


def _scale(entry: TensorEntry, first: int, into: Tensor, files: Mapping[Path, int]) -> WantedRange:
    """Return the WantedRange of the factors of rows. The file has one factor for all rows, or one for each row."""
    assert entry.dtype is not None
    if entry.nbytes != entry.dtype.itemsize:
        return want_of(entry, first, into, None, files)
    kind = entry.dtype

    def put(offset: int, data: Tensor) -> None:
        into.copy_(_aligned(data, kind).view(kind))

    return WantedRange(files[entry.file], entry.offset, entry.offset + kind.itemsize, put)


def _aligned(data: Tensor, kind: torch.dtype) -> Tensor:
    return data.clone() if data.storage_offset() % kind.itemsize else data
