"""The keys and values of a stage's blocks, kept from one model call to the next for PipeFusion (arXiv 2405.14430)."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from ..layout import TokenLayout


class KVCache:
    """Keys and values of all tokens, for each block of this stage.

    Split as attention is, nothing replicated: this rank's heads of Ulysses, this ring rank's tokens. `slots` are, for each
    patch, the places of its tokens among them, in the order in which a patch's own all-to-all delivers them.
    """

    def __init__(self, slots: Sequence[Tensor]) -> None:
        self._slots = slots
        self._blocks: dict[Hashable, Tensor] = {}

    @classmethod
    def of(cls, layout: TokenLayout, ring_rank: int) -> KVCache:
        """For the text, image and reference tokens of a layout."""
        places = [
            [torch.arange(slot.start, slot.stop) for slot in layout.slots(ring_rank, patch)]
            for patch in range(len(layout.patches))
        ]
        return cls([torch.cat(slots) for slots in places])

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(block.nbytes for block in self._blocks.values())

    def fill(self, block: Hashable, kv: Tensor) -> None:
        """Keep the keys and values of a whole call: `[2, batch, tokens, heads, head_dim]`."""
        self._blocks[block] = kv.clone()

    def update(self, block: Hashable, patch: int, kv: Tensor) -> Tensor:
        """Put in the fresh keys and values of one patch's chunk; returns all, newest of each token."""
        whole = self._blocks[block]
        whole[:, :, self._slots[patch].to(whole.device)] = kv
        return whole
