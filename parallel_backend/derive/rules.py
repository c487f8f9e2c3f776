"""Rules that fit the observations at several sizes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ..declaration import AlignedToEnd, StartAt
from ..errors import Refused

MULTIPLES = [2**power for power in range(1, 10)]
"""Multiples to which models may pad the picture's tokens."""


def starts(seen: Sequence[tuple[int, int, int]]) -> Iterator[StartAt | AlignedToEnd]:
    """Yield rules for the first position of a run of tokens, which fit all of (length, picture, start).

    The last rule fits any observation: a block that gets its tokens from another block, unchanged, needs no rule.
    """
    if all(start == length - picture for length, picture, start in seen) and any(start for *_, start in seen):
        yield AlignedToEnd()
        return
    if any(start for *_, start in seen):
        for multiple in MULTIPLES:
            if all(start == length - -(-picture // multiple) * multiple for length, picture, start in seen):
                yield AlignedToEnd(multiple)
        if len({start for *_, start in seen}) == 1:
            yield StartAt(seen[0][2])
    yield StartAt(0)


def rows(tensor: Tensor, batch: int) -> int:
    """Return the tensor's number of vectors for each row of the batch; 0 if the number differs between rows."""
    if tensor.ndim < 2:
        return 1
    between = math.prod(tensor.shape[1:-1])
    if tensor.shape[0] in (1, batch):
        return between
    return tensor.shape[0] // batch if between == 1 and tensor.shape[0] % batch == 0 else 0


def shared_heads(q: Tensor, k: Tensor, v: Tensor) -> int:
    """Return the number of key and value heads `[batch, heads, ...]` that query heads share; 0 if none are shared."""
    heads = k.shape[1]
    for count in range(1, heads):
        if heads % count == 0 and all(_repeats(x, count) for x in (k, v)):
            return count
    return 0 if heads == q.shape[1] else heads


def is_run(positions: Tensor, length: int) -> bool:
    """Return true if `length` positions follow the indices in order."""
    return positions.numel() == length and torch.equal(positions, torch.arange(length))


def is_repeated(positions: Tensor, count: int) -> bool:
    """Return true if positions follow `count` indices in order, each equally often."""
    repeats = positions.numel() // count
    return repeats * count == positions.numel() and torch.equal(
        positions, torch.arange(count).repeat_interleave(repeats)
    )


def _repeats(x: Tensor, count: int) -> bool:
    apart = x.unflatten(1, (count, -1))
    return torch.equal(apart, apart[:, :, :1].expand_as(apart))


class Undescribed(Exception):
    """The reason why no declaration fits a model, worded to follow "because"."""

    lasting = True
    """True if the reason lies in the model and its calls alone, so that another try would fail too."""


class Unproved(Undescribed):
    """A failed proof of a fitting declaration: another result, or ranks without enough time or memory."""

    lasting = False


def not_derived(kind: str, reason: str) -> Refused:
    """Return the refusal of a class for which no declaration is proved."""
    return Refused(
        f"{kind} cannot be derived, because {reason}: write its declaration by hand (docs/develop/adding-a-model.md), "
        "or run it unsharded."
    )
