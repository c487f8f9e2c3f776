"""Picture: the tokens of a latent, and its patches as sets of them."""

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
    """A latent `[batch, channels, (frames,) height, width]` as tokens of `patch_size` latent values each, in row-major order."""

    shape: tuple[int, ...]
    patch_size: tuple[int, ...]

    @property
    def grid(self) -> tuple[int, ...]:
        """Tokens along each dimension; a latent that does not divide is padded."""
        return tuple(math.ceil(size / step) for size, step in zip(self.shape[2:], self.patch_size, strict=True))

    @property
    def whole(self) -> bool:
        """Whether the latent divides into tokens."""
        return not any(size % step for size, step in zip(self.shape[2:], self.patch_size, strict=True))

    @property
    def tokens(self) -> int:
        """Tokens of one batch item."""
        return math.prod(self.grid)

    @property
    def cut_along(self) -> int:
        """The dimension of the grid that patches are cut along: rows, or frames where there are more of them."""
        rows = len(self.grid) - 2
        return max(range(rows + 1), key=lambda dim: (self.grid[dim], dim))

    @property
    def most_patches(self) -> int:
        """Into how many patches it can be cut."""
        return self.grid[self.cut_along]

    def not_whole(self) -> str:
        """Why a model that does not pad cannot take a latent that does not divide, and the nearest size that it can."""
        nearest = map(math.prod, zip(self.grid, self.patch_size, strict=True))
        return (
            f"the latent ({by(self.shape[2:])}) is not a multiple of {by(self.patch_size)}: the nearest size that works has a "
            f"latent of {by(nearest)}."
        )

    def with_concatenated(self, latent: Tensor | None) -> Picture:
        """The picture with a latent to the right of it, if there is one: its rows of tokens, and so its patches, stay."""
        if latent is None:
            return self
        return replace(self, shape=(*self.shape[:-1], self.shape[-1] + latent.shape[-1]))

    def regions(self, count: int) -> tuple[Region, ...]:
        """The parts of the latent that its patches stand for; the last one of an odd latent has a partial token."""
        along = self.cut_along
        step, size = self.patch_size[along], self.shape[2 + along]
        return tuple(
            Region(2 + along, slice(run.start * step, min(run.stop * step, size)))
            for run in cut(self.grid[along], count)
        )

    def patches(self, count: int) -> tuple[Tensor, ...]:
        """The positions of each patch's tokens, ascending."""
        grid, along = self.grid, self.cut_along
        index_along = torch.arange(grid[along]).view(-1, *[1] * (len(grid) - along - 1)).expand(grid).flatten()
        every = torch.arange(index_along.numel())
        return tuple(every[(index_along >= run.start) & (index_along < run.stop)] for run in cut(grid[along], count))


def by(sizes: Iterable[int]) -> str:
    """Sizes in words, such as `32 x 32`."""
    return " x ".join(map(str, sizes))


def as_patch_size(size: int | Sequence[int], latent_dims: int) -> tuple[int, ...]:
    """A model's `patch_size` for every dimension of its latents; a single number is that of height and width."""
    if isinstance(size, int):
        return (*[1] * (latent_dims - 2), size, size)
    return tuple(size)
