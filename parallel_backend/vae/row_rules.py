"""Which operations on a `RowTensor` stay with each rank's rows, and how. A rule gives NotImplemented where one does not."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from ..attention.kernels import choose_kernel, flash_fault
from ..attention.parallel import around_the_ring
from .norm import group_norm
from .row_tensor import RowTensor
from .rows import NOTHING, Slab

aten = torch.ops.aten
Rule = Callable[..., Any]

COPIES = (
    aten._to_copy.default,
    aten.clone.default,
    aten.detach.default,
    aten.alias.default,
    aten.copy_.default,
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.empty_like.default,
)
"""Element-wise operations that torch does not tag as such."""


def is_element_wise(func: Any) -> bool:
    """Whether each value of the result hangs on the values in its place alone."""
    tags = func.tags
    return func in COPIES or (torch.Tag.pointwise in tags and torch.Tag.nondeterministic_seeded not in tags)


def element_wise(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Each rank's rows; those of another cut are fetched."""
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

    def local(tensor: Tensor) -> Tensor:
        if isinstance(tensor, RowTensor):
            return tensor.at(first.runs)
        if tensor.ndim < from_end or tensor.shape[-from_end] == 1:
            return tensor
        return first.own(tensor, tensor.ndim - from_end)

    out = func(*(tree_map_only(Tensor, local, tuple(args))), **tree_map_only(Tensor, local, dict(kwargs)))
    return first if func._schema.is_mutable else first.like(out)


def _view(_func: Any, x: RowTensor, size: Sequence[int], *_: Any) -> Any:
    """Rows stay apart from what is before and behind them, or several become one, or one becomes several."""
    before = x.shape[: x.along].numel()
    behind, height = x.shape[x.along + 1 :].numel(), x.shape[x.along]
    known = torch.Size(n for n in size if n != -1).numel()
    target = [x.numel() // known if n == -1 else n for n in size]
    along = next((d for d, n in enumerate(target) if n != 1 and torch.Size(target[:d]).numel() == before), None)
    if along is None:
        return NotImplemented
    wanted = target[along]
    split, joined = height // wanted, wanted // height
    if wanted not in (height, joined * height) and height != split * wanted:
        return NotImplemented
    if joined > 1 and behind % joined:
        return NotImplemented
    runs = tuple(_scaled(run, wanted, height) for run in x.runs)
    mine = runs[x.axis.rank]
    if mine is None or None in runs:
        return NotImplemented
    local = x.local.reshape(*target[:along], mine.stop - mine.start, *target[along + 1 :])
    shares = local.untyped_storage().data_ptr() == x.local.untyped_storage().data_ptr()
    return x.like(local, runs, along, x.copied or not shares)  # type: ignore[arg-type]


def _scaled(run: slice, wanted: int, height: int) -> slice | None:
    """A run of rows where each is several, or several are one; None if it does not begin and end with one."""
    if run.start * wanted % height or run.stop * wanted % height:
        return None
    return slice(run.start * wanted // height, run.stop * wanted // height)


def _permute(_func: Any, x: RowTensor, dims: Sequence[int]) -> Any:
    order = [dim % x.ndim for dim in dims]
    return x.like(x.local.permute(order), along=order.index(x.along), copied=x.copied)


def _transpose(func: Any, x: RowTensor, first: int, second: int) -> Any:
    order = list(range(x.ndim))
    order[first], order[second] = order[second], order[first]
    return _permute(func, x, order)


def _unsqueeze(_func: Any, x: RowTensor, dim: int) -> Any:
    dim %= x.ndim + 1
    return x.like(x.local.unsqueeze(dim), along=x.along + (dim <= x.along), copied=x.copied)


def _squeeze(_func: Any, x: RowTensor, dims: int | Sequence[int]) -> Any:
    gone = [dim % x.ndim for dim in ([dims] if isinstance(dims, int) else dims)]
    gone = [dim for dim in gone if x.shape[dim] == 1]
    if x.along in gone:
        return NotImplemented
    along = x.along - sum(dim < x.along for dim in gone)
    return x.like(x.local.squeeze(gone), along=along, copied=x.copied)


def _expand(_func: Any, x: RowTensor, size: Sequence[int], **_: Any) -> Any:
    new = len(size) - x.ndim
    along = x.along + new
    if size[along] not in (-1, x.shape[x.along]) or x.shape[x.along] == 1:
        return NotImplemented
    return x.like(
        x.local.expand(*size[:along], x.local.shape[x.along], *size[along + 1 :]), along=along, copied=x.copied
    )


def _select(func: Any, x: RowTensor, dim: int, index: Any) -> Any:
    dim %= x.ndim
    if dim == x.along:
        return NotImplemented
    return x.like(func(x.local, dim, index), along=x.along - (dim < x.along), copied=x.copied)


def _index_select(func: Any, x: RowTensor, dim: int, index: Tensor) -> Any:
    if dim % x.ndim == x.along or isinstance(index, RowTensor):
        return NotImplemented
    return x.like(func(x.local, dim, index))


def _slice(func: Any, x: RowTensor, dim: int = 0, start: Any = None, stop: Any = None, step: int = 1) -> Any:
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


def _split(func: Any, x: RowTensor, sizes: Any, dim: int = 0) -> Any:
    if dim % x.ndim == x.along:
        return NotImplemented
    return tuple(x.like(part, copied=x.copied) for part in func(x.local, sizes, dim))


def _unbind(func: Any, x: RowTensor, dim: int = 0) -> Any:
    dim %= x.ndim
    if dim == x.along:
        return NotImplemented
    return tuple(x.like(part, along=x.along - (dim < x.along), copied=x.copied) for part in func(x.local, dim))


def _cat(func: Any, tensors: Sequence[Tensor], dim: int = 0) -> Any:
    first = next(tensor for tensor in tensors if isinstance(tensor, RowTensor))
    parts = _beside(first, tensors)
    if parts is None or dim % first.ndim == first.along:
        return NotImplemented
    return first.like(func(parts, dim))


def _stack(func: Any, tensors: Sequence[Tensor], dim: int = 0) -> Any:
    first = next(tensor for tensor in tensors if isinstance(tensor, RowTensor))
    parts, dim = _beside(first, tensors), dim % (first.ndim + 1)
    if parts is None:
        return NotImplemented
    return first.like(func(parts, dim), along=first.along + (dim <= first.along))


def _beside(first: RowTensor, tensors: Sequence[Tensor]) -> list[Tensor] | None:
    """The rows of tensors like the first one's; None if they lie otherwise."""
    alike = all(
        tensor.ndim == first.ndim
        and tensor.shape[first.along] == first.shape[first.along]
        and (not isinstance(tensor, RowTensor) or tensor.along == first.along)
        for tensor in tensors
    )
    if not alike:
        return None
    return [t.at(first.runs) if isinstance(t, RowTensor) else first.own(t, first.along) for t in tensors]


def _reduce(func: Any, x: RowTensor, *args: Any, **kwargs: Any) -> Any:
    """Along other dimensions than the rows."""
    names = [argument.name for argument in func._schema.arguments]
    given: dict[str, Any] = {**dict(zip(names[1:], args, strict=False)), **kwargs}
    dims = given.get("dim")
    if dims is None:
        return NotImplemented
    gone = {dim % x.ndim for dim in ([dims] if isinstance(dims, int) else dims)}
    if not gone or x.along in gone:
        return NotImplemented
    along = x.along if given.get("keepdim", False) else x.along - sum(dim < x.along for dim in gone)
    return x.like(func(x.local, *args, **kwargs), along=along)


def _linear(func: Any, x: Any, weight: Tensor, bias: Tensor | None = None) -> Any:
    if not isinstance(x, RowTensor) or x.along == x.ndim - 1 or isinstance(weight, RowTensor):
        return NotImplemented
    return x.like(func(x.local, weight, bias))


def _layer_norm(func: Any, x: RowTensor, shape: Sequence[int], *rest: Any) -> Any:
    if x.along >= x.ndim - len(shape):
        return NotImplemented
    return x.like(func(x.local, shape, *rest))


@dataclass(frozen=True)
class _Affine:
    num_groups: int
    weight: Tensor
    bias: Tensor
    eps: float


def _group_norm(
    _func: Any,
    x: Any,
    groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    _: Any = True,
) -> Any:
    if x.along != x.ndim - 2 or weight is None or bias is None:
        return NotImplemented
    slab = Slab(x.local, x.runs, x.axis)
    return x.like(group_norm(_Affine(groups, weight, bias, eps), slab))


def _convolution(
    func: Any,
    x: Any,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    *rest: Any,
) -> Any:
    if transposed:
        return NotImplemented

    def local(rows: Tensor, padded: Sequence[int]) -> Tensor:
        return func(rows, weight, bias, stride, padded, dilation, transposed, *rest)  # type: ignore[no-any-return]

    return _convolved(x, weight, stride, padding, dilation, local)


def _cudnn_convolution(
    func: Any,
    x: Any,
    weight: Tensor,
    padding: Sequence[int],
    stride: Sequence[int],
    dilation: Sequence[int],
    *rest: Any,
    **named: Any,
) -> Any:
    """As ComfyUI calls it past torch's choice of algorithms."""

    def local(rows: Tensor, padded: Sequence[int]) -> Tensor:
        return func(rows, weight, padded, stride, dilation, *rest, **named)  # type: ignore[no-any-return]

    return _convolved(x, weight, stride, padding, dilation, local)


def _convolved(
    x: Any,
    weight: Tensor,
    strides: Sequence[int],
    paddings: Sequence[int],
    dilations: Sequence[int],
    local: Callable[[Tensor, Sequence[int]], Tensor],
) -> Any:
    """A row of the result is where the row in the middle of what it sees is."""
    if not isinstance(x, RowTensor) or x.along != x.ndim - 2 or x.ndim != weight.ndim:
        return NotImplemented
    at = x.along - 2
    kernel, stride, padding = weight.shape[x.along], strides[at], paddings[at]
    if dilations[at] != 1:
        return NotImplemented
    height = (x.shape[x.along] + 2 * padding - kernel) // stride + 1
    starts = [min(max(-((kernel // 2 - padding - run.start) // stride), 0), height) for run in x.runs]
    starts[0] = 0
    runs = tuple(slice(start, stop) for start, stop in zip(starts, [*starts[1:], height], strict=True))
    want = [
        slice(run.start * stride - padding, (run.stop - 1) * stride - padding + kernel)
        if run.stop > run.start
        else NOTHING
        for run in runs
    ]
    rows = x.local if list(x.runs) == want else Slab(x.local, x.runs, x.axis).padded(want)
    mine = runs[x.axis.rank]
    inside = [0 if i == at else p for i, p in enumerate(paddings)]
    if mine.stop > mine.start:
        return x.like(local(rows, inside), runs)
    sizes = [
        (size + 2 * p - d * (k - 1) - 1) // s + 1
        for size, p, d, k, s in zip(x.shape[2:], paddings, dilations, weight.shape[2:], strides, strict=True)
    ]
    sizes[at] = 0
    return x.like(x.local.new_empty(x.shape[0], weight.shape[0], *sizes), runs)


def _pad(func: Any, x: RowTensor, pad: Sequence[int], *value: Any) -> Any:
    """The rows above and below come to the ranks that have the picture's first and last row."""
    place = 2 * (x.ndim - 1 - x.along)
    above, below = (*pad[place : place + 2], 0, 0)[:2]
    if min(above, below) < 0:
        return NotImplemented
    having = [rank for rank, run in enumerate(x.runs) if run.stop > run.start]
    rank, first, last = x.axis.rank, having[0], having[-1]
    total = x.shape[x.along] + above + below
    ends = [0 if r < first else total if r >= last else run.stop + above for r, run in enumerate(x.runs)]
    runs = tuple(slice(start, stop) for start, stop in zip([0, *ends[:-1]], ends, strict=True))
    mine = list(pad)
    mine[place : place + 2] = (above if rank == first else 0, below if rank == last else 0)[: len(pad) - place]
    if first <= rank <= last and x.local.shape[x.along]:
        return x.like(func(x.local, mine, *value), runs)
    shape = list(x.local.shape)
    for number in range(len(pad) // 2):
        shape[-1 - number] += mine[2 * number] + mine[2 * number + 1]
    return x.like(x.local.new_empty(shape), runs)


def _enlarge(func: Any, x: RowTensor, size: Sequence[int], *scales: Any) -> Any:
    """The nearest row, a whole number of times."""
    at, height = x.along - 2, x.shape[x.along]
    if at < 0 or size[at] % height:
        return NotImplemented
    times = size[at] // height
    runs = tuple(slice(run.start * times, run.stop * times) for run in x.runs)
    rows = x.local.shape[x.along]
    mine = [*size[:at], rows * times, *size[at + 1 :]]
    if not rows:
        return x.like(x.local.new_empty(*x.shape[:2], *mine), runs)
    return x.like(func(x.local, mine, *scales), runs)


def _enlarge_by(func: Any, x: RowTensor, size: Sequence[int] | None, scales: Sequence[float] | None) -> Any:
    """As `torch.nn.functional.interpolate` calls it, which torch would take to pieces."""
    if size is None:
        assert scales is not None
        size = [int(length * scale) for length, scale in zip(x.shape[2:], scales, strict=True)]
    given: Sequence[float | None] = scales or [None] * len(size)
    return _enlarge(func.overloadpacket.default, x, size, *given)


def attend(q: Any, k: Any, v: Any) -> RowTensor:
    """Every position attends to all others, with one head as wide as the channels; keys go round the ring of ranks.

    q, k, v: `[batch, channels, (frames,) height, width]`, of one cut.
    """

    def tokens(x: Any) -> Tensor:
        return x.at(q.runs).flatten(2).transpose(1, 2).contiguous().unsqueeze(2)  # type: ignore[no-any-return]

    row = q.shape[2:].numel() // q.shape[q.along]
    counts = [row * (run.stop - run.start) for run in q.runs]
    channels = q.shape[1]
    kernel = choose_kernel("auto", q.local.device, q.dtype, channels, flash_fault(q.local.device))
    out = around_the_ring(q.axis, counts, kernel.attend, tokens(q), torch.stack((tokens(k), tokens(v))))
    return q.like(out.squeeze(2).transpose(1, 2).reshape(q.local.shape))  # type: ignore[no-any-return]


RULES: Mapping[Any, Rule] = MappingProxyType(
    {
        aten.view.default: _view,
        aten._unsafe_view.default: _view,
        aten._reshape_alias.default: _view,
        aten.permute.default: _permute,
        aten.transpose.int: _transpose,
        aten.unsqueeze.default: _unsqueeze,
        aten.squeeze.dim: _squeeze,
        aten.squeeze.dims: _squeeze,
        aten.expand.default: _expand,
        aten.select.int: _select,
        aten.index_select.default: _index_select,
        aten.slice.Tensor: _slice,
        aten.split.Tensor: _split,
        aten.split_with_sizes.default: _split,
        aten.unbind.int: _unbind,
        aten.cat.default: _cat,
        aten.stack.default: _stack,
        aten.mean.dim: _reduce,
        aten.sum.dim_IntList: _reduce,
        aten.amax.default: _reduce,
        aten.var.correction: _reduce,
        aten.linalg_vector_norm.default: _reduce,
        aten.linear.default: _linear,
        aten.layer_norm.default: _layer_norm,
        aten.group_norm.default: _group_norm,
        aten.convolution.default: _convolution,
        aten.cudnn_convolution.default: _cudnn_convolution,
        aten.constant_pad_nd.default: _pad,
        aten.replication_pad2d.default: _pad,
        aten.replication_pad3d.default: _pad,
        aten.upsample_nearest2d.vec: _enlarge_by,
        aten.upsample_nearest3d.vec: _enlarge_by,
        aten._upsample_nearest_exact2d.vec: _enlarge_by,
        aten._upsample_nearest_exact3d.vec: _enlarge_by,
        aten.upsample_nearest2d.default: _enlarge,
        aten.upsample_nearest3d.default: _enlarge,
        aten._upsample_nearest_exact2d.default: _enlarge,
        aten._upsample_nearest_exact3d.default: _enlarge,
    }
)
"""Operations that stay local besides the element-wise ones, with what they are asked: the operation and its arguments."""
