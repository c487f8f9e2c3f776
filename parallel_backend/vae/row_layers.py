"""Convolutions and norms of a latent whose rows lie on several ranks."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..layout import cut
from .rows import Slab


def conv2d(conv: nn.Conv2d, x: Slab) -> Slab:
    """Apply a 3x3 convolution with padding 1, or a 1x1 convolution, to every frame. This is a collective."""
    reach = conv.kernel_size[0] // 2
    return x.with_values(_over_frames(conv, x.with_neighbours(reach) if reach else x.values, (0, reach), x.rows))


def halved(conv: nn.Conv2d, x: Slab) -> Slab:
    """Apply a 3x3 convolution of stride 2 to every frame. This is a collective.

    The convolution pads one row below and one column at the right.
    """
    height = x.height // 2
    runs = [slice(run.start // 2, run.stop // 2) for run in x.runs]
    want = [slice(2 * run.start, 2 * run.stop + 1) if run.stop > run.start else slice(0, 0) for run in runs]
    values = F.pad(x.padded(want), (0, 1))
    mine = runs[x.axis.rank]
    assert runs[-1].stop == height
    return Slab(_over_frames(conv, values, (0, 0), mine.stop - mine.start), tuple(runs), x.axis)


def doubled(conv: nn.Conv2d, x: Slab) -> Slab:
    """Repeat every row and column, then apply a convolution. This is a collective."""
    return conv2d(conv, x.enlarged(twice(twice(x.values, -2), -1)))


def twice(values: Tensor, dim: int, times: int = 2) -> Tensor:
    """Repeat every item along a dimension, as nearest-neighbour interpolation does. The tensor may be empty."""
    return values if times == 1 else values.repeat_interleave(times, dim)


class CausalConvolution:
    """Causal convolutions over frames that come in batches.

    A convolution sees the last frames of the previous batch. In the first batch it sees copies of that batch's first frame.

    Args:
        forgets_single_frames: if True, a first batch of a single frame leaves no frames for the next batch, as in ComfyUI's
            CogVideoX VAE.
    """

    def __init__(self, forgets_single_frames: bool = False) -> None:
        self._forgets = forgets_single_frames
        self._before: dict[nn.Module, Tensor] = {}

    def __call__(self, causal: Any, x: Slab) -> Slab:
        """Apply one of diffusers' CogVideoXCausalConv3d of kernel 3x3x3. This is a collective.

        Args:
            x: `[1, channels, frames, rows, width]`.
        """
        conv: nn.Conv3d = causal.conv
        earlier = conv.kernel_size[0] - 1
        wide = x.with_neighbours(1, earlier)
        before = self._before.pop(causal, None)
        single = before is None and x.values.shape[2] == 1
        wide[:, :, :earlier] = wide[:, :, earlier : earlier + 1] if before is None else before
        if not (single and self._forgets):
            self._before[causal] = wide[:, :, -earlier:].clone()
        if not x.rows:
            return x.with_values(wide.new_empty(1, conv.out_channels, wide.shape[2] - earlier, 0, wide.shape[-1]))
        return x.with_values(F.conv3d(wide, conv.weight, conv.bias, padding=(0, 0, 1)))


def _over_frames(conv: nn.Conv2d, values: Tensor, padding: tuple[int, int], rows: int) -> Tensor:
    """Apply a convolution to `[batch, channels, rows, width]`, or to every frame of `[1, channels, frames, rows, width]`."""
    pictures = values[0].transpose(0, 1) if values.dim() == 5 else values
    if rows:
        out = F.conv2d(pictures, conv.weight, conv.bias, conv.stride, padding)
    else:
        width = (values.shape[-1] + 2 * padding[1] - conv.kernel_size[1]) // conv.stride[1] + 1
        out = pictures.new_empty(pictures.shape[0], conv.out_channels, 0, width)
    return out.transpose(0, 1)[None] if values.dim() == 5 else out


PARTS = 8
"""Number of parts in which channels are computed in fp32, so that fp32 copies stay small next to the activations."""

Affine = tuple[Tensor, Tensor]


class GroupNorm(Protocol):
    """The settings of a group normalisation, under the names of torch's module."""

    num_groups: int
    eps: float

    @property
    def weight(self) -> Tensor:
        """Return the scale, `[channels]`."""

    @property
    def bias(self) -> Tensor:
        """Return the shift, `[channels]`."""


def group_norm(norm: GroupNorm, x: Slab) -> Tensor:
    """Return the normalised local rows in the dtype of x. The arithmetic is fp32. This is a collective."""
    scale, shift = affine(norm, x)
    out = torch.empty_like(x.values)
    for part in cut(out.shape[1], PARTS):
        torch.add(x.values[:, part] * scale[:, part], shift[:, part], out=out[:, part])
    return out


def affine(norm: GroupNorm, x: Slab) -> Affine:
    """Return scale and shift of each channel, fp32 `[batch, channels, 1, ...]`, from statistics over all ranks' rows.

    This is a collective. The ranks' means and sums of squared deviations (M2) are merged as Chan, Golub and LeVeque do (1979).
    """
    means, squares = statistics(x.values, norm.num_groups)
    batch, channels = x.values.shape[:2]
    share = torch.full_like(means, x.rows / x.height)  # sent too: a tensor from a list would make the host wait
    mine = torch.stack((means, squares, share)).reshape(1, 1, -1)
    ranks = x.axis.size
    means, squares, shares = x.axis.all_gather(mine, [1] * ranks).view(ranks, 3, batch, norm.num_groups).unbind(1)
    row = torch.Size([*x.values.shape[1:-2], x.values.shape[-1]]).numel() // norm.num_groups
    mean = (shares * means).sum(0)
    variance = (squares.sum(0) / (row * x.height)) + (shares * (means - mean).square()).sum(0)
    rstd = torch.rsqrt(variance + norm.eps)
    per_group = channels // norm.num_groups
    scale = rstd.repeat_interleave(per_group, 1) * norm.weight.float()
    shift = norm.bias.float() - mean.repeat_interleave(per_group, 1) * scale
    shape = (batch, channels, *[1] * (x.values.dim() - 2))
    return scale.view(shape), shift.view(shape)


def statistics(values: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """Return mean and M2 of each group of channels, fp32 `[batch, groups]`. Both are zero if there are no values."""
    parts = []
    for part in values.unflatten(1, (groups, -1)).split(max(1, groups // PARTS), dim=1):
        if part.numel() == 0:
            nothing = torch.zeros(part.shape[:2], dtype=torch.float32, device=values.device)
            parts.append((nothing, nothing))
            continue
        variance, mean = torch.var_mean(part.float(), dim=tuple(range(2, part.dim())), correction=0)
        parts.append((mean, variance * part[0, 0].numel()))
    return torch.cat([mean for mean, _ in parts], 1), torch.cat([square for _, square in parts], 1)
