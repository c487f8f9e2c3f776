"""The placements of the tokens of every stream of a latent, for the whole call or for one patch."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from ...declaration import LatentTokens, PrefixedTokens, ReplicatedTokens, StreamKind
from ...errors import Refused
from .picture import Picture
from .placement import Placement, after_prefix, by_shares, everywhere, joined

T = TypeVar("T")


class TokenLayout:
    """The placements of all streams of a latent, and the values that follow from them alone.

    Each placement is computed once for a kind and length of stream, and kept from step to step.

    Args:
        shares: the sequence ranks' parts of the tokens, as in the plan.
        picture: the latent's tokens.
        patches: the number of patches that the latent is cut into.
        patch: the patch that is computed, or None for the whole latent.
    """

    def __init__(self, shares: tuple[int, ...], picture: Picture, patches: int, patch: int | None) -> None:
        self.patches = patches
        self.patch = patch
        self.shares = shares
        self._picture = picture
        self._patch_tokens = picture.patches(patches)
        self._known: dict[Hashable, Any] = {}

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return the result of `make`, computed once for each key. Placements in a key are compared by identity."""
        if key not in self._known:
            self._known[key] = make()
        return self._known[key]  # type: ignore[no-any-return]

    def of(
        self, length: int, kind: StreamKind, unmasked: Tensor | None = None, trailing: int = 0, prefix: int = 0
    ) -> Placement:
        """Return the placement of a stream.

        Args:
            length: the number of tokens of the stream.
            kind: the kind of the stream.
            unmasked: the positions of the tokens that are not masked; None for all.
            trailing: the number of tokens at its end that are not the latent's.
            prefix: the number of a `PrefixedTokens` stream's first tokens, which every rank holds.

        Raises:
            Refused: the stream is too short for the latent's tokens.
        """

        def find() -> Placement:
            if isinstance(kind, ReplicatedTokens) or (isinstance(kind, PrefixedTokens) and length == prefix):
                whole = everywhere(length, len(self.shares))
            elif isinstance(kind, PrefixedTokens):
                whole = after_prefix(prefix, self.of(length - prefix, LatentTokens()))
            else:
                unit = self.part_of(kind)[1]
                whole = by_shares(self.shares, length, self._by_patch(length, kind, unmasked, trailing), unit)
            return whole if self.patch is None else whole.only(self.patch)

        return self.once((length, kind, None if unmasked is None else tuple(unmasked.tolist()), trailing, prefix), find)

    @property
    def tokens(self) -> int:
        """Return the number of the latent's tokens."""
        return self._picture.tokens

    def part_of(self, kind: StreamKind) -> tuple[int, int]:
        """Return the number of tokens in a part of a frame, and the number of consecutive tokens that stay on one rank."""
        if not isinstance(kind, LatentTokens) or not kind.parts_per_frame:
            return 1, 1
        *_, height, width = self._picture.grid
        part = height * width // kind.parts_per_frame
        return part, math.gcd(part, width)

    def joined(self, placements: Sequence[Placement]) -> Placement:
        """Return the placement of concatenated streams."""
        return self.once(("joined", *placements), lambda: joined(placements))

    def part(self, placement: Placement, start: int, stop: int) -> Placement:
        """Return the placement of the tokens from `start` to `stop` of a stream."""
        return self.once(("part", placement, start, stop), lambda: placement.part(start, stop))

    def _by_patch(self, length: int, kind: StreamKind, unmasked: Tensor | None, trailing: int) -> list[Tensor]:
        every = torch.arange(length) if unmasked is None else unmasked
        if not isinstance(kind, LatentTokens):
            return [every]
        tokens = self._picture.tokens
        start = kind.start(length - trailing, tokens)
        if not 0 <= start <= length - tokens:
            if self._picture.whole:
                raise Refused(
                    f"the model makes {length} tokens of a latent of {tokens}: something in its conditioning is of another size "
                    "than the latent, or this ComfyUI is newer or older than this pack knows; use Load Diffusion Model."
                )
            raise Refused(
                f"the model makes {length} tokens where the picture has {tokens}, because {self._picture.not_whole()}"
            )
        first, *other_patches = (positions + start for positions in self._patch_tokens)
        around = every[(every < start) | (every >= start + tokens)]
        return [torch.cat([around, first]).sort().values, *other_patches]
