"""The keys and values of a stage's blocks, kept from one model call to the next for PipeFusion (arXiv 2405.14430)."""

from __future__ import annotations

from collections.abc import Hashable

from torch import Tensor

from ..transfers import sent_to


class KVCache:
    """Keys and values of all tokens, for each block of this stage.

    Split as attention is, nothing replicated: this rank's heads of Ulysses, this ring rank's tokens. `slots` are, for each
    patch, the places of its tokens among them, in the order in which a patch's own all-to-all delivers them; they move to
    the device when they are first used, for all that share the list.
    """

    def __init__(self, slots: list[Tensor]) -> None:
        self._slots = slots
        self._blocks: dict[Hashable, Tensor] = {}

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(block.nbytes for block in self._blocks.values())

    def fill(self, block: Hashable, kv: Tensor) -> None:
        """Keep the keys and values of a whole call: `[2, batch, tokens, heads, head_dim]`, from now on the cache's own."""
        self._blocks[block] = kv

    def update(self, block: Hashable, patch: int, k: Tensor, v: Tensor) -> Tensor:
        """Put in the fresh keys and values of one patch's chunk; returns all, newest of each token."""
        whole = self._blocks[block]
        slots = self._slots[patch] = sent_to(self._slots[patch], whole.device)
        whole[0].index_copy_(1, slots, k)
        whole[1].index_copy_(1, slots, v)
        return whole
