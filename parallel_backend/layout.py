"""SequenceSplit: the tokens and heads of one attention on each rank.

Tokens are cut into contiguous runs, one for each sequence rank, in proportion to the ranks' shares. With equal shares the
lengths differ by at most one. A run may be empty. All collectives take their sizes from here, so ranks exchange no sizes and
nothing is padded.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise


def cut(total: int, parts: int) -> list[slice]:
    """Cut `total` items into contiguous slices whose lengths differ by at most one; slices may be empty."""
    return cut_by(total, (1,) * parts)


def cut_by(total: int, shares: Sequence[int]) -> list[slice]:
    """Cut `total` items into contiguous slices in proportion to `shares`, each less than one item off; slices may be empty."""
    ends = (0, *accumulate(shares))
    return [slice(start * total // ends[-1], stop * total // ends[-1]) for start, stop in pairwise(ends)]


def parts_by_size(sizes: Sequence[int], parts: int) -> list[int]:
    """Return the part that each item belongs to. Parts are runs of items of about equal total size."""
    total = sum(sizes) or 1
    middles = [end - size / 2 for end, size in zip(accumulate(sizes), sizes, strict=True)]
    bounds = [total * (part + 1) / parts for part in range(parts - 1)]
    return [bisect(bounds, middle) for middle in middles]


def length(run: slice) -> int:
    """Return the number of items in a slice with a start and a stop, as `cut` returns it."""
    return int(run.stop - run.start)


@dataclass(frozen=True)
class HeadSlices:
    """Some heads of a Ulysses rank: query heads, and the key heads that they use."""

    q: slice
    kv: slice


@dataclass(frozen=True)
class SequenceSplit:
    """The tokens and heads of the ring x ulysses sequence ranks.

    Sequence rank = ring rank * ulysses + ulysses rank.

    Attributes:
        tokens: the number of tokens on each sequence rank.
        heads: the number of query heads.
        ring: the number of ring ranks.
        ulysses: the number of Ulysses ranks.
        shares: each sequence rank's share of the work. Heads are cut by the sum over ring ranks.
        kv_heads: the number of key heads. Each is used by equally many consecutive query heads. 0: each query head has its own.
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
        """Build the split of a sequence whose runs of tokens, such as text and image, are each cut over all ranks.

        Args:
            runs: the number of tokens of each run.
            heads: as the attribute.
            ring: as the attribute.
            ulysses: as the attribute.
            shares: as the attribute.
            kv_heads: as the attribute.
        """
        rank_slices = zip(*(cut_by(run, shares) for run in runs), strict=True)
        tokens = tuple(sum(map(length, slices)) for slices in rank_slices)
        return cls(tokens, heads, ring, ulysses, shares, kv_heads)

    @property
    def group_size(self) -> int:
        """Return the number of query heads that use one key head."""
        return self.heads // self.kv_heads if self.kv_heads else 1

    def ulysses_tokens(self, ring_rank: int) -> list[int]:
        """Return the number of tokens on each Ulysses rank of one ring rank."""
        return list(self.tokens[ring_rank * self.ulysses : (ring_rank + 1) * self.ulysses])

    def ring_tokens(self) -> list[int]:
        """Return the number of tokens on each ring rank, which is the length of its block of keys."""
        return [sum(self.ulysses_tokens(ring_rank)) for ring_rank in range(self.ring)]

    def head_counts(self) -> list[int]:
        """Return the number of query heads of each Ulysses rank; at least one if there are enough."""
        shares = [sum(self.shares[rank :: self.ulysses]) for rank in range(self.ulysses)]
        min_heads = int(self.heads >= self.ulysses)
        return [min_heads + length(run) for run in cut_by(self.heads - min_heads * self.ulysses, shares)]

    def query_slices(self) -> list[slice]:
        """Return the query heads of each Ulysses rank."""
        return [slice(*ends) for ends in pairwise((0, *accumulate(self.head_counts())))]

    def kv_slices(self) -> list[slice]:
        """Return the key heads that each Ulysses rank uses. Two ranks share a key head if its query heads lie on both."""
        group = self.group_size
        return [slice(heads.start // group, -(-heads.stop // group)) for heads in self.query_slices()]

    def kv_counts(self) -> list[int]:
        """Return the number of key heads that each Ulysses rank uses."""
        return list(map(length, self.kv_slices()))

    def head_chunks(self, max_chunks: int) -> list[list[HeadSlices]]:
        """Cut the heads of all Ulysses ranks into chunks; each rank has heads in every chunk.

        Chunks are cut between key heads, so query heads that use the same key head stay together.

        Args:
            max_chunks: the largest number of chunks. Fewer result if a rank has fewer key heads.

        Returns:
            For each chunk the heads of each Ulysses rank, equal on all ranks.
        """
        kv_slices, group = self.kv_slices(), self.group_size
        count = max(1, min(max_chunks, *map(length, kv_slices)))

        def heads_of(q: slice, kv: slice, part: slice) -> HeadSlices:
            kv_part = slice(kv.start + part.start, kv.start + part.stop)
            return HeadSlices(slice(max(q.start, kv_part.start * group), min(q.stop, kv_part.stop * group)), kv_part)

        by_rank = [
            [heads_of(q, kv, part) for part in cut(length(kv), count)]
            for q, kv in zip(self.query_slices(), kv_slices, strict=True)
        ]
        return [list(chunk) for chunk in zip(*by_rank, strict=True)]
