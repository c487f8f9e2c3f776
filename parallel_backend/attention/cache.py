"""The keys and values of a stage's blocks, kept from one model call to the next for PipeFusion (arXiv 2405.14430)."""

from __future__ import annotations

from torch import Tensor

from ..layout import TokenLayout, length


class KVCache:
    """Keys and values of all tokens, for each block of this stage.

    Split as attention is, nothing replicated: this rank's heads of Ulysses, this ring rank's tokens. For its slots see
    TokenLayout.slots.
    """

    def __init__(self, layout: TokenLayout, ring_rank: int) -> None:
        self._slots = [layout.slots(ring_rank, patch) for patch in range(len(layout.patches))]
        self._blocks: dict[int, Tensor] = {}

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(block.nbytes for block in self._blocks.values())

    def fill(self, block: int, kv: Tensor) -> None:
        """Keep the keys and values of a whole call: `[2, batch, tokens, heads, head_dim]`."""
        self._blocks[block] = kv.clone()

    def update(self, block: int, patch: int, kv: Tensor) -> Tensor:
        """Put in the fresh keys and values of one patch's chunk; returns all, newest of each token."""
        whole, offset = self._blocks[block], 0
        for slot in self._slots[patch]:
            whole[:, :, slot] = kv[:, :, offset : offset + length(slot)]
            offset += length(slot)
        return whole
