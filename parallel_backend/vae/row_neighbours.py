"""Dispatch rules for operations that see other ranks' rows: convolution, normalisation, attention, padding, enlarging.

A rule receives the operation and its arguments. It returns NotImplemented for arguments that it does not support.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..attention.kernels import choose_kernel
from ..attention.packages import package_failures
from ..attention.sequence_parallel import ring_attention
from .row_layers import group_norm
from .row_tensor import RowTensor, Runs
from .rows import NOTHING, Slab


@dataclass
class _Affine:
    """The arguments of a call of torch's group normalisation, under the names of torch's module."""

    num_groups: int
    weight: Tensor
    bias: Tensor
    eps: float


def normalised(
    _func: Any,
    x: Any,
    groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    _: Any = True,
) -> Any:
    """Apply a group norm with statistics over all ranks' rows."""
    if x.along != x.ndim - 2 or weight is None or bias is None:
        return NotImplemented
    slab = Slab(x.local, x.runs, x.axis)
    return x.like(group_norm(_Affine(groups, weight, bias, eps), slab))


def convolution(
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
    """Apply torch's convolution. A transposed convolution gives NotImplemented."""
    if transposed:
        return NotImplemented

    def local(rows: Tensor, padded: Sequence[int]) -> Tensor:
        return func(rows, weight, bias, stride, padded, dilation, transposed, *rest)  # type: ignore[no-any-return]

    return _convolved(x, weight, stride, padding, dilation, local)


def cudnn_convolution(
    func: Any,
    x: Any,
    weight: Tensor,
    padding: Sequence[int],
    stride: Sequence[int],
    dilation: Sequence[int],
    *rest: Any,
    **named: Any,
) -> Any:
    """Apply cuDNN's convolution, which ComfyUI calls directly to bypass torch's choice of algorithms."""

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
    """Apply a convolution. A row of the result lies on the rank that holds the middle row of its receptive field."""
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
    slab, mine = Slab(x.local, x.runs, x.axis), runs[x.axis.rank]
    inside = [0 if i == at else p for i, p in enumerate(paddings)]
    picture = len(paddings) == 2  # videos have their memory peak elsewhere, and need not compute edges twice
    if picture and runs == x.runs and padding and slab.rows >= 2 * padding:
        return x.like(_patched(slab, x.along, padding, lambda rows: local(rows, inside), local(x.local, paddings)))
    rows = x.local if list(x.runs) == want else slab.padded(want)
    if mine.stop > mine.start:
        return x.like(local(rows, inside), runs)
    sizes = [
        (size + 2 * p - d * (k - 1) - 1) // s + 1
        for size, p, d, k, s in zip(x.shape[2:], paddings, dilations, weight.shape[2:], strides, strict=True)
    ]
    sizes[at] = 0
    return x.like(x.local.new_empty(x.shape[0], weight.shape[0], *sizes), runs)


def _patched(slab: Slab, along: int, reach: int, local: Callable[[Tensor], Tensor], out: Tensor) -> Tensor:
    """Return a convolution of a rank's own rows, with its edge rows computed anew from the neighbours' rows.

    This avoids a copy of the rows together with those of the neighbours. The call is a collective and sends what the copy would
    need.
    """
    x, (above, below) = slab.values, slab.edges(reach)
    out.narrow(along, 0, reach).copy_(local(torch.cat((above, x[..., : 2 * reach, :]), along)))
    out.narrow(along, slab.rows - reach, reach).copy_(local(torch.cat((x[..., -2 * reach :, :], below), along)))
    return out


def pad(func: Any, x: RowTensor, pad: Sequence[int], *value: Any) -> Any:
    """Pad a picture. The ranks that hold the picture's first and last row get the rows above and below."""
    return _padded(func, x, pad, value, x.runs)


def mirror(func: Any, x: RowTensor, pad: Sequence[int]) -> Any:
    """Pad by reflection. The reflected rows above and below may be rows of a neighbour."""
    index, height = 2 * (x.ndim - 1 - x.along), x.shape[x.along]
    above, below = (*pad[index : index + 2], 0, 0)[:2]
    first, last = _ends(x)
    want = list(x.runs)
    want[first] = slice(0, max(want[first].stop, min(above + 1, height)))
    want[last] = slice(min(want[last].start, max(height - below - 1, 0)), height)
    return _padded(func, x, pad, (), tuple(want))


def _padded(func: Any, x: RowTensor, pad: Sequence[int], value: Sequence[Any], want: Runs) -> Any:
    """Pad rows where the picture ends.

    Args:
        want: the rows that each rank needs in order to pad its own.
    """
    index = 2 * (x.ndim - 1 - x.along)
    above, below = (*pad[index : index + 2], 0, 0)[:2]
    if min(above, below) < 0:
        return NotImplemented
    rank, (first, last) = x.axis.rank, _ends(x)
    total = x.shape[x.along] + above + below
    ends = [0 if r < first else total if r >= last else run.stop + above for r, run in enumerate(x.runs)]
    runs = tuple(slice(start, stop) for start, stop in zip([0, *ends[:-1]], ends, strict=True))
    mine = list(pad)
    mine[index : index + 2] = (above if rank == first else 0, below if rank == last else 0)[: len(pad) - index]
    rows, run = x.at(want), runs[rank]
    if first <= rank <= last and x.local.shape[x.along]:
        more = x.runs[rank].start - want[rank].start
        return x.like(func(rows, mine, *value).narrow(x.along, more, run.stop - run.start), runs)
    shape = list(x.local.shape)
    for number in range(len(pad) // 2):
        shape[-1 - number] += mine[2 * number] + mine[2 * number + 1]
    return x.like(x.local.new_empty(shape), runs)


def _ends(x: RowTensor) -> tuple[int, int]:
    """Return the ranks that hold the picture's first and last row."""
    having = [rank for rank, run in enumerate(x.runs) if run.stop > run.start]
    return having[0], having[-1]


def enlarge(func: Any, x: RowTensor, size: Sequence[int], *scales: Any) -> Any:
    """Enlarge by nearest-neighbour interpolation. The new height must be a multiple of the old height."""
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


def enlarge_by(func: Any, x: RowTensor, size: Sequence[int] | None, scales: Sequence[float] | None) -> Any:
    """Apply `enlarge` to the arguments that `torch.nn.functional.interpolate` passes. Without this rule, torch decomposes it."""
    if size is None:
        assert scales is not None
        size = [int(length * scale) for length, scale in zip(x.shape[2:], scales, strict=True)]
    factors: Sequence[float | None] = scales or [None] * len(size)
    return enlarge(func.overloadpacket.default, x, size, *factors)


def attend(whole: Callable[..., Tensor], q: Any, k: Any, v: Any) -> Tensor:
    """Compute attention between all positions, with one head as wide as the channels. Keys go round the ring of ranks.

    Args:
        whole: the function that this one replaces. It computes pictures that were gathered before.
        q, k, v: `[batch, channels, (frames,) height, width]`, with the same cut.
    """
    if not isinstance(q, RowTensor):
        return whole(q, k, v)

    def tokens(x: Any) -> Tensor:
        return x.at(q.runs).flatten(2).transpose(1, 2).contiguous().unsqueeze(2)  # type: ignore[no-any-return]

    row = q.shape[2:].numel() // q.shape[q.along]
    counts = [row * (run.stop - run.start) for run in q.runs]
    channels = q.shape[1]
    kernel = choose_kernel("auto", q.local.device, q.dtype, channels, package_failures(q.local.device))
    out = ring_attention(tokens(q), torch.stack((tokens(k), tokens(v))), q.axis, counts, kernel.attend)
    return q.like(out.squeeze(2).transpose(1, 2).reshape(q.local.shape))
