"""Placements: the tokens of a stream that each sequence rank holds, and the patches of these tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ...layout import cut_by
from ...transfers import to_device


@dataclass(frozen=True, eq=False)
class Placement:
    """The tokens that each rank holds of a stream.

    No rank holds the tokens of other patches and masked text.

    Attributes:
        length: the number of tokens of the stream.
        ranks: for each rank, the positions of its tokens, ascending (int64, on the CPU).
        patches: for each rank, the patch of each of its tokens.
        everywhere: True if every rank holds all tokens.
        replicated: the number of first tokens that every rank holds, in a stream that is cut.
    """

    length: int
    ranks: tuple[Tensor, ...]
    patches: tuple[Tensor, ...]
    everywhere: bool = False
    replicated: int = 0

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """Return the number of tokens of each rank."""
        return tuple(positions.numel() for positions in self.ranks)

    @cached_property
    def all_positions(self) -> Tensor:
        """Return the positions of the tokens that some rank holds, ascending."""
        return torch.cat(self.ranks).unique()

    def same_as(self, placement: Placement) -> bool:
        """Return true if every rank holds the same tokens of a stream of the same length."""
        if self is placement:
            return True
        same_shape = self.length == placement.length and self.counts == placement.counts
        return same_shape and all(torch.equal(a, b) for a, b in zip(self.ranks, placement.ranks, strict=True))

    def part(self, start: int, stop: int) -> Placement:
        """Return the placement of the tokens from `start` to `stop`, as a stream of their own."""
        inside = [(positions >= start) & (positions < stop) for positions in self.ranks]
        return self._masked(inside, start, stop - start, max(0, min(stop, self.replicated) - start))

    def only(self, patch: int) -> Placement:
        """Return the placement of one patch's tokens and of the stream's replicated tokens; the stream keeps its length."""
        first = 0 if self.everywhere else self.replicated
        pairs = zip(self.ranks, self.patches, strict=True)
        inside = [(patches == patch) | (positions < first) for positions, patches in pairs]
        return self._masked(inside, 0, self.length, self.replicated)

    def before(self, rank: int, position: int) -> int:
        """Return the number of a rank's tokens before a position of the stream."""
        return int(torch.searchsorted(self.ranks[rank], position))

    def indices_of(self, positions: Tensor) -> Tensor:
        """Return the indices of tokens at these positions in the concatenation of all ranks' tokens."""
        index_of_position = torch.full((self.length,), -1)
        together = torch.cat(self.ranks)
        index_of_position[together] = torch.arange(together.numel())
        indices = index_of_position[positions]
        assert bool((indices >= 0).all()), "a token that no rank has"
        return indices

    def _masked(self, masks: Sequence[Tensor], start: int, length: int, replicated: int) -> Placement:
        ranks = tuple(positions[mask] - start for positions, mask in zip(self.ranks, masks, strict=True))
        patches = tuple(p[mask] for p, mask in zip(self.patches, masks, strict=True))
        everywhere = self.everywhere or 0 < length == replicated
        return Placement(length, ranks, patches, everywhere, replicated)


def everywhere(length: int, ranks: int) -> Placement:
    """Return a placement in which every rank holds all tokens, and all belong to the first patch."""
    positions, patches = torch.arange(length), torch.zeros(length, dtype=torch.int64)
    return Placement(length, (positions,) * ranks, (patches,) * ranks, everywhere=True, replicated=length)


def after_prefix(prefix: int, tokens: Placement) -> Placement:
    """Return the placement of a stream whose first tokens every rank holds, with other tokens after them.

    Args:
        prefix: the number of the first tokens.
        tokens: the placement of the tokens after them.
    """
    whole = everywhere(prefix, len(tokens.ranks))
    return Placement(
        prefix + tokens.length,
        tuple(torch.cat([first, own + prefix]) for first, own in zip(whole.ranks, tokens.ranks, strict=True)),
        tuple(torch.cat([first, own]) for first, own in zip(whole.patches, tokens.patches, strict=True)),
        replicated=prefix,
    )


@dataclass(frozen=True)
class Selection:
    """A set of positions along a dimension: `count` positions from `start`, or the positions in `index` on the device."""

    count: int
    start: int
    index: Tensor | None

    @classmethod
    def of(cls, positions: Tensor, device: torch.device) -> Selection:
        """Return the selection of different positions, which are a tensor on the CPU."""
        count = positions.numel()
        start = int(positions[0]) if count else 0
        run = torch.equal(positions, torch.arange(start, start + count))
        return cls(count, start, None if run else to_device(positions, device))

    def __call__(self, tensor: Tensor, dim: int) -> Tensor:
        """Return the entries of a tensor at these positions; a view if they are contiguous."""
        if self.index is not None:
            return tensor.index_select(dim, self.index)
        return tensor if self.count == tensor.shape[dim] else tensor.narrow(dim, self.start, self.count)


def joined(placements: Sequence[Placement]) -> Placement:
    """Return the placement of concatenated streams. All of them are cut, or all are held by every rank."""
    assert len({placement.everywhere for placement in placements}) == 1
    offsets, total = [], 0
    for placement in placements:
        offsets.append(total)
        total += placement.length
    ranks = zip(*(p.ranks for p in placements), strict=True)
    return Placement(
        total,
        tuple(torch.cat([run + offset for run, offset in zip(runs, offsets, strict=True)]) for runs in ranks),
        tuple(torch.cat(runs) for runs in zip(*(p.patches for p in placements), strict=True)),
        placements[0].everywhere,
    )


def by_shares(shares: Sequence[int], length: int, patches: Sequence[Tensor], unit: int = 1) -> Placement:
    """Return the placement that cuts each patch's tokens into one run for each rank. A run may be empty.

    Args:
        shares: the ranks' relative parts of the tokens.
        length: the number of tokens of the stream.
        patches: the positions of each patch's tokens, ascending.
        unit: the number of tokens that stay together.
    """
    runs: list[list[Tensor]] = [[] for _ in shares]
    labels: list[list[Tensor]] = [[] for _ in shares]
    for number, positions in enumerate(patches):
        for rank, run in enumerate(cut_by(math.ceil(positions.numel() / unit), shares)):
            own = positions[run.start * unit : run.stop * unit]
            runs[rank].append(own)
            labels[rank].append(torch.full_like(own, number))
    orders = [torch.cat(run).argsort() for run in runs]
    return Placement(
        length,
        tuple(torch.cat(run)[order] for run, order in zip(runs, orders, strict=True)),
        tuple(torch.cat(label)[order] for label, order in zip(labels, orders, strict=True)),
    )


def order_of(placements: Sequence[Placement]) -> Tensor:
    """Return the indices that bring the all-to-all's output into the model's order.

    The output has the tokens of all ranks, rank by rank. The model concatenates its streams.
    """
    together = joined(placements)
    return torch.cat(together.ranks).argsort()


def slots_of(placements: Sequence[Placement], ranks: Sequence[int], patches: int) -> list[Tensor]:
    """Return the indices of each patch's tokens in the all-to-all's output, which has the tokens of `ranks` rank by rank."""
    numbers = torch.cat([placement.patches[rank] for rank in ranks for placement in placements])
    return [(numbers == patch).nonzero()[:, 0] for patch in range(patches)]
