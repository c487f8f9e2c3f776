"""A latent picture as tokens: rows of square patches of it."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from ..layout import cut
from .family import Patch
from .functions import pad_circularly


def grid(latent_shape: Sequence[int], size: int) -> tuple[int, int]:
    """Rows and columns of tokens of a latent `[batch, channels, height, width]`, for squares of `size`."""
    return math.ceil(latent_shape[2] / size), math.ceil(latent_shape[3] / size)


def row_patches(latent_shape: Sequence[int], size: int, count: int) -> tuple[Patch, ...]:
    """The picture in `count` patches of whole rows of tokens each; the last patch of an odd latent has a partial row."""
    rows, columns = grid(latent_shape, size)
    return tuple(
        Patch(
            tokens=slice(run.start * columns, run.stop * columns),
            dim=2,
            span=slice(run.start * size, min(run.stop * size, latent_shape[2])),
        )
        for run in cut(rows, count)
    )


def patchify(latent: Tensor, size: int) -> Tensor:
    """`[batch, channels, height, width]` to `[batch, rows * columns, channels * size**2]`, padded circularly."""
    batch, channels = latent.shape[:2]
    rows, columns = grid(latent.shape, size)
    squares = pad_circularly(latent, size).view(batch, channels, rows, size, columns, size)
    return squares.permute(0, 2, 4, 1, 3, 5).reshape(batch, rows * columns, channels * size**2)
