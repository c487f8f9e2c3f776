"""TokenLayout: which rank holds which text and image tokens, and which attention heads.

The image tokens are cut into patches (one, unless PipeFusion is used). Text and each patch are cut into contiguous runs,
one a sequence rank, whose lengths differ by at most one; a run may be empty. Every collective takes its split sizes from
here, so no rank has to ask another and nothing is ever padded. The text belongs to the first patch's chunk; a rank's tokens are
ordered text, image.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor


def cut(total: int, parts: int) -> list[slice]:
    """`total` items as `parts` contiguous slices whose lengths differ by at most one; some may be empty."""
    return [slice(part * total // parts, (part + 1) * total // parts) for part in range(parts)]


def length(run: slice) -> int:
    """How many items a slice made by `cut` holds."""
    return int(run.stop - run.start)


@dataclass(frozen=True)
class SequenceSplit:
    """How the tokens and heads of one attention lie on ring x ulysses ranks, as TokenLayout numbers them."""

    tokens: tuple[int, ...]
    heads: int
    ring: int
    ulysses: int

    def ulysses_tokens(self, ring_rank: int) -> list[int]:
        """Tokens held by each Ulysses rank of one ring rank, in rank order."""
        return list(self.tokens[ring_rank * self.ulysses : (ring_rank + 1) * self.ulysses])

    def ring_tokens(self) -> list[int]:
        """Tokens held by each ring rank: the lengths of the KV blocks in the ring."""
        return [sum(self.ulysses_tokens(ring_rank)) for ring_rank in range(self.ring)]

    def head_counts(self) -> list[int]:
        """Attention heads that each Ulysses rank computes; they differ by at most one."""
        return [length(run) for run in cut(self.heads, self.ulysses)]


@dataclass(frozen=True)
class TokenLayout:
    """The cut of one sequence over ring x ulysses sequence ranks (sequence rank = ring rank * ulysses + ulysses rank).

    `patches` are slices of the image tokens. A layout may hold only some of a picture's patches (see `only`).
    """

    text_tokens: int
    patches: tuple[slice, ...]
    heads: int
    ring: int
    ulysses: int

    @property
    def ranks(self) -> int:
        """Sequence ranks."""
        return self.ring * self.ulysses

    def only(self, patch: int) -> TokenLayout:
        """The chunk of one patch: its tokens and, with the first one, the text."""
        return replace(self, text_tokens=self.text_tokens if patch == 0 else 0, patches=(self.patches[patch],))

    def text(self, rank: int) -> slice:
        """The run of text tokens that a sequence rank holds."""
        return cut(self.text_tokens, self.ranks)[rank]

    def image(self, rank: int) -> list[slice]:
        """The runs of image tokens that a sequence rank holds, one a patch."""
        runs = [cut(length(patch), self.ranks)[rank] for patch in self.patches]
        return [
            slice(patch.start + run.start, patch.start + run.stop)
            for patch, run in zip(self.patches, runs, strict=True)
        ]

    def image_tokens(self, rank: int) -> int:
        """How many image tokens a sequence rank holds."""
        return sum(map(length, self.image(rank)))

    def tokens(self, rank: int) -> int:
        """How many tokens a sequence rank holds: text and image, in this order."""
        return length(self.text(rank)) + self.image_tokens(rank)

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

    def slots(self, ring_rank: int, patch: int) -> list[slice]:
        """Where one patch's chunk lies in a ring rank's key-value cache, which holds this whole layout.

        The cache is ordered as the all-to-all delivers a whole sequence: by Ulysses rank, and within it patch by
        patch; text goes with the first.
        """
        slots, offset = [], 0
        for rank in range(ring_rank * self.ulysses, (ring_rank + 1) * self.ulysses):
            before = sum(self.only(earlier).tokens(rank) for earlier in range(patch))
            slots.append(slice(offset + before, offset + before + self.only(patch).tokens(rank)))
            offset += self.tokens(rank)
        return slots

    def in_order(self, tokens: Tensor) -> Tensor:
        """Image tokens joined rank by rank `[batch, tokens, channels]`, put into the picture's order."""
        if len(self.patches) == 1:
            return tokens
        ordered = torch.empty_like(tokens)
        offset = 0
        for run in self._runs():
            ordered[:, run] = tokens[:, offset : offset + length(run)]
            offset += length(run)
        return ordered

    def _runs(self) -> Iterator[slice]:
        for rank in range(self.ranks):
            yield from self.image(rank)
