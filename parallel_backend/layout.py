"""TokenLayout: which rank holds which text and image tokens, and which attention heads.

Text and image tokens are each cut into contiguous runs, one a sequence rank, whose lengths differ by at most one;
a run may be empty. Every collective takes its split sizes from here, so no rank has to ask another and nothing is
ever padded.
"""

from __future__ import annotations

from dataclasses import dataclass


def cut(total: int, parts: int) -> list[slice]:
    """`total` items as `parts` contiguous slices whose lengths differ by at most one; some may be empty."""
    return [slice(part * total // parts, (part + 1) * total // parts) for part in range(parts)]


def length(run: slice) -> int:
    """How many items a slice made by `cut` holds."""
    return int(run.stop - run.start)


@dataclass(frozen=True)
class TokenLayout:
    """The cut of one sequence over ring x ulysses sequence ranks (sequence rank = ring rank * ulysses + ulysses rank)."""

    text_tokens: int
    image_tokens: int
    heads: int
    ring: int
    ulysses: int

    @property
    def ranks(self) -> int:
        """Sequence ranks."""
        return self.ring * self.ulysses

    def text(self, rank: int) -> slice:
        """The run of text tokens that a sequence rank holds."""
        return cut(self.text_tokens, self.ranks)[rank]

    def image(self, rank: int) -> slice:
        """The run of image tokens that a sequence rank holds."""
        return cut(self.image_tokens, self.ranks)[rank]

    def tokens(self, rank: int) -> int:
        """How many tokens, text and image, a sequence rank holds."""
        return length(self.text(rank)) + length(self.image(rank))

    def ulysses_tokens(self, ring_rank: int) -> list[int]:
        """Tokens held by each Ulysses rank of one ring rank, in rank order."""
        first = ring_rank * self.ulysses
        return [self.tokens(rank) for rank in range(first, first + self.ulysses)]

    def ring_tokens(self) -> list[int]:
        """Tokens held by each ring rank (the sum over its Ulysses ranks): the lengths of the KV blocks in the ring."""
        return [sum(self.ulysses_tokens(ring_rank)) for ring_rank in range(self.ring)]

    def head_counts(self) -> list[int]:
        """Attention heads that each Ulysses rank computes; they differ by at most one."""
        return [length(run) for run in cut(self.heads, self.ulysses)]
