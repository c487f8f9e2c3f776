"""SequenceSplit: how the tokens and heads of one attention lie on the ranks.

Runs of tokens are cut into contiguous parts, one a sequence rank, whose lengths differ by at most one; a part may be empty.
Every collective takes its split sizes from here, so no rank has to ask another and nothing is ever padded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


def cut(total: int, parts: int) -> list[slice]:
    """`total` items as `parts` contiguous slices whose lengths differ by at most one; some may be empty."""
    return [slice(part * total // parts, (part + 1) * total // parts) for part in range(parts)]


def length(run: slice) -> int:
    """How many items a slice made by `cut` holds."""
    return int(run.stop - run.start)


@dataclass(frozen=True)
class SequenceSplit:
    """The tokens of each of ring x ulysses sequence ranks (sequence rank = ring rank * ulysses + ulysses rank)."""

    tokens: tuple[int, ...]
    heads: int
    ring: int
    ulysses: int

    @classmethod
    def of(cls, runs: Sequence[int], heads: int, ring: int, ulysses: int) -> SequenceSplit:
        """Of runs of so many tokens, such as text and image, each of which all ranks share."""
        ranks = ring * ulysses
        parts = zip(*(cut(run, ranks) for run in runs), strict=True)
        return cls(tuple(sum(map(length, own)) for own in parts), heads, ring, ulysses)

    def ulysses_tokens(self, ring_rank: int) -> list[int]:
        """Tokens held by each Ulysses rank of one ring rank, in rank order."""
        return list(self.tokens[ring_rank * self.ulysses : (ring_rank + 1) * self.ulysses])

    def ring_tokens(self) -> list[int]:
        """Tokens held by each ring rank: the lengths of the KV blocks in the ring."""
        return [sum(self.ulysses_tokens(ring_rank)) for ring_rank in range(self.ring)]

    def head_counts(self) -> list[int]:
        """Attention heads that each Ulysses rank computes; they differ by at most one."""
        return [length(run) for run in cut(self.heads, self.ulysses)]
