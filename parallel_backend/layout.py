"""SequenceSplit: how the tokens and heads of one attention lie on the ranks.

Runs of tokens are cut into contiguous parts, one a sequence rank, in proportion to the ranks' shares: where those are equal,
lengths differ by at most one. A part may be empty. Every collective takes its split sizes from here, so no rank has to ask
another and nothing is ever padded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise


def cut(total: int, parts: int) -> list[slice]:
    """`total` items as `parts` contiguous slices whose lengths differ by at most one; some may be empty."""
    return cut_by(total, (1,) * parts)


def cut_by(total: int, shares: Sequence[int]) -> list[slice]:
    """`total` items as contiguous slices in proportion to `shares`; each is off by less than one item, and may be empty."""
    ends = (0, *accumulate(shares))
    return [slice(start * total // ends[-1], stop * total // ends[-1]) for start, stop in pairwise(ends)]


def length(run: slice) -> int:
    """How many items a slice made by `cut` holds."""
    return int(run.stop - run.start)


@dataclass(frozen=True)
class HeadRuns:
    """Some of a Ulysses rank's heads: of queries, and of the keys and values that they need."""

    q: slice
    kv: slice


@dataclass(frozen=True)
class SequenceSplit:
    """The tokens of each of ring x ulysses sequence ranks (sequence rank = ring rank * ulysses + ulysses rank).

    `shares` are in proportion to what each of them is to do; tokens are cut by them already, heads are by their sums.
    `kv_heads` are the heads of keys and values, each of which as many of the queries' heads, one after the other, share; 0
    where every head has its own.
    """

    tokens: tuple[int, ...]
    heads: int
    ring: int
    ulysses: int
    shares: tuple[int, ...]
    kv_heads: int = 0

    @classmethod
    def of(
        cls, runs: Sequence[int], heads: int, ring: int, ulysses: int, shares: tuple[int, ...], kv_heads: int = 0
    ) -> SequenceSplit:
        """Of runs of so many tokens, such as text and image; all ranks share each run."""
        parts = zip(*(cut_by(run, shares) for run in runs), strict=True)
        return cls(tuple(sum(map(length, own)) for own in parts), heads, ring, ulysses, shares, kv_heads)

    @property
    def group(self) -> int:
        """How many of the queries' heads share one of keys and values."""
        return self.heads // self.kv_heads if self.kv_heads else 1

    def ulysses_tokens(self, ring_rank: int) -> list[int]:
        """Tokens held by each Ulysses rank of one ring rank, in rank order."""
        return list(self.tokens[ring_rank * self.ulysses : (ring_rank + 1) * self.ulysses])

    def ring_tokens(self) -> list[int]:
        """Tokens held by each ring rank: the lengths of the KV blocks in the ring."""
        return [sum(self.ulysses_tokens(ring_rank)) for ring_rank in range(self.ring)]

    def head_counts(self) -> list[int]:
        """Attention heads that each Ulysses rank computes; none is left without one where there are enough."""
        shares = [sum(self.shares[rank :: self.ulysses]) for rank in range(self.ulysses)]
        least = int(self.heads >= self.ulysses)
        return [least + length(run) for run in cut_by(self.heads - least * self.ulysses, shares)]

    def head_runs(self) -> list[slice]:
        """The heads of queries that each Ulysses rank has."""
        return [slice(*ends) for ends in pairwise((0, *accumulate(self.head_counts())))]

    def kv_runs(self) -> list[slice]:
        """The heads of keys and values that each Ulysses rank needs for its own; two ranks' where a group lies in both."""
        return [slice(run.start // self.group, -(-run.stop // self.group)) for run in self.head_runs()]

    def kv_counts(self) -> list[int]:
        """How many heads of keys and values each Ulysses rank needs."""
        return list(map(length, self.kv_runs()))

    def head_chunks(self, most: int) -> list[list[HeadRuns]]:
        """The heads of all Ulysses ranks in at most so many chunks, each with some of every rank's.

        Chunks are cut between heads of keys and values, so that what shares one stays together. There are as many as the rank
        with the fewest allows, the same on all ranks.
        """
        count = max(1, min(most, *self.kv_counts()))
        parts = [cut(kv, count) for kv in self.kv_counts()]
        return [[self._heads(rank, parts[rank][chunk]) for rank in range(self.ulysses)] for chunk in range(count)]

    def _heads(self, rank: int, part: slice) -> HeadRuns:
        """Of a rank's heads of keys and values those of a part, and its heads of queries that need them."""
        q, kv = self.head_runs()[rank], self.kv_runs()[rank]
        part = slice(kv.start + part.start, kv.start + part.stop)
        return HeadRuns(slice(max(q.start, part.start * self.group), min(q.stop, part.stop * self.group)), part)
