"""Dispatch rules that leave each rank with its own rows: element-wise operations, views, joins, reductions of other dimensions.

A rule receives the operation and its arguments. It returns NotImplemented if the rows would not stay separate.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..distributed_tensor import of_parts
from .row_tensor import RowTensor


def element_wise(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Apply an element-wise operation to this rank's rows. Rows of a tensor with another cut are fetched."""
    tensors = [arg for arg in (*args, *kwargs.values()) if isinstance(arg, Tensor)]
    first = next(tensor for tensor in tensors if isinstance(tensor, RowTensor))
    if func._schema.is_mutable:
        if not isinstance(args[0], RowTensor):
            return NotImplemented
        first = args[0]
        assert not first.copied, f"{func} writes into the copy of a picture's values"
    from_end = first.ndim - first.along
    for tensor in tensors:
        if tensor.ndim > first.ndim or (isinstance(tensor, RowTensor) and tensor.ndim - tensor.along != from_end):
            return NotImplemented

    def part(tensor: Tensor) -> Tensor:
        return tensor.at(first.runs) if isinstance(tensor, RowTensor) else first.part_of(tensor)

    out = of_parts(func, part, args, kwargs)
    return first if func._schema.is_mutable else first.like(out)


def view(_func: Any, x: RowTensor, size: Sequence[int], *_: Any) -> Any:
    """Return a view whose rows are the old rows, groups of old rows, or equal parts of old rows.

    A picture of a single row gives NotImplemented: its row cannot be told from other dimensions of size 1.
    """
    before = x.shape[: x.along].numel()
    trailing, height = x.shape[x.along + 1 :].numel(), x.shape[x.along]
    if height == 1:
        return NotImplemented
    known = torch.Size(n for n in size if n != -1).numel()
    target = [x.numel() // known if n == -1 else n for n in size]
    along = next((d for d, n in enumerate(target) if n != 1 and torch.Size(target[:d]).numel() == before), None)
    if along is None:
        return NotImplemented
    new_height = target[along]
    split, joined = height // new_height, new_height // height
    if new_height not in (height, joined * height) and height != split * new_height:
        return NotImplemented
    if joined > 1 and trailing % joined:
        return NotImplemented
    runs = tuple(_scaled(run, new_height, height) for run in x.runs)
    mine = runs[x.axis.rank]
    if mine is None or None in runs:
        return NotImplemented
    local = x.local.reshape(*target[:along], mine.stop - mine.start, *target[along + 1 :])
    shares = local.untyped_storage().data_ptr() == x.local.untyped_storage().data_ptr()
    return x.like(local, runs, along, x.copied or not shares)  # type: ignore[arg-type]


def reshape(func: Any, x: RowTensor, size: Sequence[int]) -> Any:
    """Return a view, or a copy where torch would copy the whole picture too. Code may write into such a copy."""
    out = view(func, x, size)
    if out is NotImplemented or _viewable(x, size):
        return out
    shares = out.local.untyped_storage().data_ptr() == x.local.untyped_storage().data_ptr()
    return out.like(out.local.clone() if shares else out.local)


def _viewable(x: RowTensor, size: Sequence[int]) -> bool:
    """Return True if torch could view the whole picture in another shape.

    The whole picture counts as laid out like the rows and without gaps. With gaps, as in a slice, fewer shapes are views, never
    more.
    """
    order = sorted(range(x.ndim), key=x.local.stride, reverse=True)
    dense = torch.empty([x.shape[dim] for dim in order], device="meta")
    try:
        dense.permute([order.index(dim) for dim in range(x.ndim)]).view(list(size))
    except RuntimeError:
        return False
    return True


def _scaled(run: slice, new_height: int, height: int) -> slice | None:
    """Convert a run of rows to a picture of another height. Return None if the run does not begin and end with a whole row."""
    if run.start * new_height % height or run.stop * new_height % height:
        return None
    return slice(run.start * new_height // height, run.stop * new_height // height)


def permute(_func: Any, x: RowTensor, dims: Sequence[int]) -> Any:
    """Permute the dimensions, that of the rows included."""
    order = [dim % x.ndim for dim in dims]
    return x.like(x.local.permute(order), along=order.index(x.along), copied=x.copied)


def transpose(func: Any, x: RowTensor, first: int, second: int) -> Any:
    """Swap two dimensions. One of them may be that of the rows."""
    order = list(range(x.ndim))
    order[first], order[second] = order[second], order[first]
    return permute(func, x, order)


def unsqueeze(_func: Any, x: RowTensor, dim: int) -> Any:
    """Add a dimension of size 1."""
    dim %= x.ndim + 1
    return x.like(x.local.unsqueeze(dim), along=x.along + (dim <= x.along), copied=x.copied)


def squeeze(_func: Any, x: RowTensor, dims: int | Sequence[int]) -> Any:
    """Remove dimensions of size 1. A single row gives NotImplemented."""
    gone = [dim % x.ndim for dim in ([dims] if isinstance(dims, int) else dims)]
    gone = [dim for dim in gone if x.shape[dim] == 1]
    if x.along in gone:
        return NotImplemented
    along = x.along - sum(dim < x.along for dim in gone)
    return x.like(x.local.squeeze(gone), along=along, copied=x.copied)


def expand(_func: Any, x: RowTensor, size: Sequence[int], **_: Any) -> Any:
    """Expand other dimensions than that of the rows."""
    new = len(size) - x.ndim
    along = x.along + new
    if size[along] not in (-1, x.shape[x.along]) or x.shape[x.along] == 1:
        return NotImplemented
    return x.like(
        x.local.expand(*size[:along], x.local.shape[x.along], *size[along + 1 :]), along=along, copied=x.copied
    )


def repeat(func: Any, x: RowTensor, times: Sequence[int]) -> Any:
    """Repeat along other dimensions than that of the rows."""
    along = x.along + len(times) - x.ndim
    if times[along] != 1:
        return NotImplemented
    return x.like(func(x.local, times), along=along)


def empty(func: Any, x: RowTensor, *args: Any, **kwargs: Any) -> Any:
    """Return an empty tensor of any shape, with dtype and device of the picture. Every rank has all of it."""
    return func(x.local, *args, **kwargs)


def select(func: Any, x: RowTensor, dim: int, index: Any) -> Any:
    """Select an index of another dimension than that of the rows."""
    dim %= x.ndim
    if dim == x.along:
        return NotImplemented
    return x.like(func(x.local, dim, index), along=x.along - (dim < x.along), copied=x.copied)


def index_select(func: Any, x: RowTensor, dim: int, index: Tensor) -> Any:
    """Select several indices of another dimension than that of the rows."""
    if dim % x.ndim == x.along or isinstance(index, RowTensor):
        return NotImplemented
    return x.like(func(x.local, dim, index))


def take(func: Any, x: RowTensor, dim: int = 0, start: Any = None, stop: Any = None, step: int = 1) -> Any:
    """Slice a dimension. Of a slice of rows, each rank keeps its own rows that are in the slice."""
    dim %= x.ndim
    if dim != x.along:
        return x.like(func(x.local, dim, start, stop, step), copied=x.copied)
    first, last, _ = slice(start, stop).indices(x.shape[dim])
    if step != 1 or last <= first:
        return NotImplemented
    runs = tuple(slice(*(min(max(end, first), last) - first for end in (run.start, run.stop))) for run in x.runs)
    mine = runs[x.axis.rank]
    skipped = min(max(first - x.runs[x.axis.rank].start, 0), x.local.shape[dim])
    return x.like(x.local.narrow(dim, skipped, mine.stop - mine.start), runs, copied=x.copied)


def parted(func: Any, x: RowTensor, sizes: Any, dim: int = 0) -> Any:
    """Split along another dimension than that of the rows."""
    if dim % x.ndim == x.along:
        return NotImplemented
    return tuple(x.like(part, copied=x.copied) for part in func(x.local, sizes, dim))


def unbind(func: Any, x: RowTensor, dim: int = 0) -> Any:
    """Unbind another dimension than that of the rows."""
    dim %= x.ndim
    if dim == x.along:
        return NotImplemented
    return tuple(x.like(part, along=x.along - (dim < x.along), copied=x.copied) for part in func(x.local, dim))


def cat(func: Any, tensors: Sequence[Tensor], dim: int = 0) -> Any:
    """Concatenate along another dimension than that of the rows."""
    first = next(tensor for tensor in tensors if isinstance(tensor, RowTensor))
    parts = _aligned_rows(first, tensors)
    if parts is None or dim % first.ndim == first.along:
        return NotImplemented
    return first.like(func(parts, dim))


def stacked(func: Any, tensors: Sequence[Tensor], dim: int = 0) -> Any:
    """Stack along a new dimension."""
    first = next(tensor for tensor in tensors if isinstance(tensor, RowTensor))
    parts, dim = _aligned_rows(first, tensors), dim % (first.ndim + 1)
    if parts is None:
        return NotImplemented
    return first.like(func(parts, dim), along=first.along + (dim <= first.along))


def _aligned_rows(first: RowTensor, tensors: Sequence[Tensor]) -> list[Tensor] | None:
    """Return this rank's rows of all tensors, cut as the first tensor is, or None if the shapes differ."""
    same_height = all(
        tensor.ndim == first.ndim
        and tensor.shape[first.along] == first.shape[first.along]
        and (not isinstance(tensor, RowTensor) or tensor.along == first.along)
        for tensor in tensors
    )
    if not same_height:
        return None
    return [t.at(first.runs) if isinstance(t, RowTensor) else first.own(t, first.along) for t in tensors]


def reduce(func: Any, x: RowTensor, *args: Any, **kwargs: Any) -> Any:
    """Reduce other dimensions than that of the rows."""
    names = [argument.name for argument in func._schema.arguments]
    arguments: dict[str, Any] = {**dict(zip(names[1:], args, strict=False)), **kwargs}
    dims = arguments.get("dim")
    if dims is None:
        return NotImplemented
    gone = {dim % x.ndim for dim in ([dims] if isinstance(dims, int) else dims)}
    if not gone or x.along in gone:
        return NotImplemented
    along = x.along if arguments.get("keepdim", False) else x.along - sum(dim < x.along for dim in gone)
    return x.like(func(x.local, *args, **kwargs), along=along)


def linear(func: Any, x: Any, weight: Tensor, bias: Tensor | None = None) -> Any:
    """Multiply every position by a weight. The rows must not be the dimension that the product sums over."""
    if not isinstance(x, RowTensor) or x.along == x.ndim - 1 or isinstance(weight, RowTensor):
        return NotImplemented
    return x.like(func(x.local, weight, bias))


def layer_norm(func: Any, x: RowTensor, shape: Sequence[int], *rest: Any) -> Any:
    """Normalise over dimensions after that of the rows."""
    if x.along >= x.ndim - len(shape):
        return NotImplemented
    return x.like(func(x.local, shape, *rest))
