"""The tokens of a latent, and its patches as sets of tokens."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...layout import cut
from ..inputs import Region


@dataclass(frozen=True)
class Picture:
    """The tokens of a latent `[batch, channels, (frames,) height, width]`, in row-major order.

    Attributes:
        shape: the shape of the latent.
        patch_size: the latent values of one token in each dimension.
    """

    shape: tuple[int, ...]
    patch_size: tuple[int, ...]

    @property
    def grid(self) -> tuple[int, ...]:
        """Return the number of tokens along each dimension. A latent that `patch_size` does not divide is padded."""
        return tuple(math.ceil(size / step) for size, step in zip(self.shape[2:], self.patch_size, strict=True))

    @property
    def whole(self) -> bool:
        """Return True if the latent divides into tokens without padding."""
        return not any(size % step for size, step in zip(self.shape[2:], self.patch_size, strict=True))

    @property
    def tokens(self) -> int:
        """Return the number of tokens of one batch item."""
        return math.prod(self.grid)

    @property
    def cut_along(self) -> int:
        """Return the dimension of the grid along which patches are cut: rows, or frames if there are more frames."""
        rows = len(self.grid) - 2
        return max(range(rows + 1), key=lambda dim: (self.grid[dim], dim))

    @property
    def most_patches(self) -> int:
        """Return the largest number of patches that the latent can be cut into."""
        return self.grid[self.cut_along]

    def not_whole(self) -> str:
        """Return the reason why a model without padding cannot take this latent, and the nearest size that works."""
        nearest = map(math.prod, zip(self.grid, self.patch_size, strict=True))
        return (
            f"the latent ({by(self.shape[2:])}) is not a multiple of {by(self.patch_size)}: the nearest size that works has a "
            f"latent of {by(nearest)}."
        )

    def with_concatenated(self, latent: Tensor | None) -> Picture:
        """Return the picture with another latent to its right, if there is one. The rows of tokens and the patches stay."""
        if latent is None:
            return self
        return replace(self, shape=(*self.shape[:-1], self.shape[-1] + latent.shape[-1]))

    def regions(self, count: int) -> tuple[Region, ...]:
        """Return each patch's region of the latent. If the latent needs padding, the last region ends inside a token."""
        along = self.cut_along
        step, size = self.patch_size[along], self.shape[2 + along]
        return tuple(
            Region(2 + along, slice(run.start * step, min(run.stop * step, size)))
            for run in cut(self.grid[along], count)
        )

    def patches(self, count: int) -> tuple[Tensor, ...]:
        """Return the positions of each patch's tokens, ascending."""
        grid, along = self.grid, self.cut_along
        index_along = torch.arange(grid[along]).view(-1, *[1] * (len(grid) - along - 1)).expand(grid).flatten()
        every = torch.arange(index_along.numel())
        return tuple(every[(index_along >= run.start) & (index_along < run.stop)] for run in cut(grid[along], count))


def by(sizes: Iterable[int]) -> str:
    """Return sizes as text, such as `32 x 32`."""
    return " x ".join(map(str, sizes))


def as_patch_size(size: int | Sequence[int], latent_dims: int) -> tuple[int, ...]:
    """Return a model's patch size for every dimension of its latents. A single number applies to height and width."""
    if isinstance(size, int):
        return (*[1] * (latent_dims - 2), size, size)
    return tuple(size)
