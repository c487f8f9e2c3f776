"""Finds the picture's tokens in a tensor, from its changes when rows, columns and frames of the latent change."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class Tokens:
    """The picture's tokens along one dimension of a tensor, or along one dimension for each axis of the picture.

    Attributes:
        dim: the first dimension of the tokens.
        grid: True if each axis of the picture has its own dimension, from `dim` on.
        length: all tokens along the dimension.
        start: the position of the first token of the picture.
        count: the number of the picture's tokens.
        step: latent values along each axis that make one token.
        of: the argument to which the tokens belong; empty for the latent.
    """

    dim: int
    grid: bool
    length: int
    start: int
    count: int
    step: tuple[int, ...]
    of: str = ""


NOISE = 1e-5
"""Allowed error relative to the largest value: sums may differ slightly if other rows of a matrix product change."""


def differs(was: Tensor, now: Tensor) -> Tensor:
    """Return a bool tensor: True where a value has changed by more than rounding may cause."""
    if not (was.is_floating_point() or was.is_complex()) or not was.numel():
        return was != now
    return (was - now).abs() > NOISE * was.abs().max()


def find_tokens(changed: Sequence[Tensor]) -> Tokens | None:
    """Return the picture's tokens in a tensor, or None if the tokens cannot be told apart.

    Args:
        changed: for each axis of the picture a bool tensor `[size, *shape of the tensor]`: the elements that change with an
            index.
    """
    shape = changed[0].shape[1:]
    for dim in range(len(shape) - len(changed)):
        if tokens := _grid(changed, dim):
            return tokens
    for dim in range(len(shape) - 1):
        if tokens := _flat(changed, dim):
            return tokens
    return None


def moved(known: Tokens, changed: Tensor, picture: Sequence[int]) -> Tokens | None:
    """Return the tokens at another size, from the elements that change with the whole latent; None if their count differs."""
    grid = [size // step for size, step in zip(picture, known.step, strict=True)]
    if known.grid:
        here = tuple(changed.shape[known.dim : known.dim + len(grid)]) == tuple(grid)
        count = math.prod(grid)
        return replace(known, length=count, count=count) if here else None
    positions = _along(changed[None], known.dim)[0].nonzero()[:, 0]
    start, count = (int(positions[0]), positions.numel()) if positions.numel() else (0, 0)
    if count != math.prod(grid) or not torch.equal(positions, torch.arange(start, start + count)):
        return None
    return replace(known, length=changed.shape[known.dim], start=start, count=count)


def _flat(changed: Sequence[Tensor], dim: int) -> Tokens | None:
    profiles = [_along(each, dim) for each in changed]  # [size, length]
    pictured = torch.stack([profile.any(dim=0) for profile in profiles]).all(dim=0)
    if not bool(pictured.any()):
        return None
    start, count, length = int(pictured.nonzero()[0]), int(pictured.sum()), pictured.numel()
    steps = [_step(profile[:, start]) for profile in profiles]
    if not all(steps) or count > length - start or not bool(pictured[start : start + count].all()):
        return None
    grid = [profile.shape[0] // step for profile, step in zip(profiles, steps, strict=True)]
    if math.prod(grid) != count or count == 1:
        return None
    positions = torch.arange(count)
    for axis, (profile, step) in enumerate(zip(profiles, steps, strict=True)):
        position = positions // math.prod(grid[axis + 1 :]) % grid[axis]
        if not _follows(profile[:, start : start + count], position, step):
            return None
        if bool(profile[:, :start].any()) or bool(profile[:, start + count :].any()):
            return None
    return Tokens(dim, False, length, start, count, tuple(steps))


def _grid(changed: Sequence[Tensor], dim: int) -> Tokens | None:
    steps = []
    for axis, axis_changes in enumerate(changed):
        profile = _along(axis_changes, dim + axis)
        step = _step(profile[:, 0])
        if not step or profile.shape[0] != step * profile.shape[1]:
            return None
        if not _follows(profile, torch.arange(profile.shape[1]), step):
            return None
        steps.append(step)
    count = math.prod(axis_changes.shape[0] // step for axis_changes, step in zip(changed, steps, strict=True))
    return Tokens(dim, True, count, 0, count, tuple(steps)) if count > 1 else None


def _along(changed: Tensor, dim: int) -> Tensor:
    """Return a bool tensor `[size, length]`: True if anything changed at a position along the dimension."""
    return changed.movedim(dim + 1, 1).flatten(2).any(dim=2)


def _step(profile: Tensor) -> int:
    """Return the number of rows of the first token; 0 if these are not the first rows, or are not separate from the others."""
    step, size = int(profile.sum()), profile.numel()
    apart = step < size or size == 1
    return step if step and apart and bool(profile[:step].all()) and size % step == 0 else 0


def _follows(profile: Tensor, position: Tensor, step: int) -> bool:
    """Return true if each token changes only with its own `step` rows.

    Args:
        profile: `[rows, tokens]`, true where changing a row of the latent changes a token.
        position: `[tokens]`, the position of each token along the rows.
        step: rows of one token.
    """
    rows = torch.arange(profile.shape[0]) // step
    return torch.equal(profile, rows[:, None] == position[None])


NOTHING, SEVERAL = -1, -2
"""Values for a position that changes with no index, and with more than one index."""


def codes(count: int) -> Iterator[Tensor]:
    """Yield bool tensors `[count]` of the indices to disturb. A position that follows one index shows its number in binary."""
    numbers = torch.arange(1, count + 1)
    for bit in range(count.bit_length()):
        having = (numbers >> bit) % 2 == 1
        yield having
        yield ~having


def decoded(changed: Sequence[Tensor]) -> Tensor:
    """Return the index that each position follows, from the positions that changed for each of `codes`."""
    having, without = torch.stack(list(changed[::2])), torch.stack(list(changed[1::2]))
    weights = (2 ** torch.arange(len(having))).view(-1, *[1] * (having.ndim - 1))
    number = (having * weights).sum(dim=0) - 1
    number[~(having ^ without).all(dim=0)] = SEVERAL
    number[~(having | without).any(dim=0)] = NOTHING
    return number
