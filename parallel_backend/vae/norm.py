"""Group normalisation whose statistics span the rows of all ranks."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from ..layout import cut
from .rows import Slab

PARTS = 8
"""Parts in which channels are computed in fp32, so that fp32 copies stay small beside the activations."""

Affine = tuple[Tensor, Tensor]


class GroupNorm(Protocol):
    """What there is to know of a group normalisation, as torch's module calls it."""

    num_groups: int
    eps: float

    @property
    def weight(self) -> Tensor:
        """The scale, `[channels]`."""

    @property
    def bias(self) -> Tensor:
        """The shift, `[channels]`."""


def group_norm(norm: GroupNorm, x: Slab) -> Tensor:
    """Normalised local rows, in x's dtype; the arithmetic is fp32. A collective."""
    scale, shift = affine(norm, x)
    out = torch.empty_like(x.values)
    for part in cut(out.shape[1], PARTS):
        torch.add(x.values[:, part] * scale[:, part], shift[:, part], out=out[:, part])
    return out


def affine(norm: GroupNorm, x: Slab) -> Affine:
    """Scale and shift of each channel, fp32 `[batch, channels, 1, ...]`, by statistics over the rows of all ranks.

    Means and sums of squared deviations (M2) of the ranks are merged as Chan, Golub and LeVeque do (1979).
    """
    means, squares = statistics(x.values, norm.num_groups)
    batch, channels = x.values.shape[:2]
    share = torch.full_like(means, x.rows / x.height)  # sent with them, as a list of all would be waited for
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
    """Mean and M2 of each group of channels, fp32 `[batch, groups]`; zeros where there are no values."""
    parts = []
    for part in values.unflatten(1, (groups, -1)).split(max(1, groups // PARTS), dim=1):
        if part.numel() == 0:
            nothing = torch.zeros(part.shape[:2], dtype=torch.float32, device=values.device)
            parts.append((nothing, nothing))
            continue
        variance, mean = torch.var_mean(part.float(), dim=tuple(range(2, part.dim())), correction=0)
        parts.append((mean, variance * part[0, 0].numel()))
    return torch.cat([mean for mean, _ in parts], 1), torch.cat([square for _, square in parts], 1)
