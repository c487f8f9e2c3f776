"""Weights of which each rank holds a part of every block, gathered for the time of use."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ..comm.communicator import Communicator
from .block_bytes import BlockBytes
from .host_memory import HOST
from .store import Run, Store


class Sharded(Store):
    """Each rank holds 1/N of every block's bytes; the next block's gather is in flight during this one's work.

    Two blocks are whole at a time at the most, and none between forwards. Parameters outside of blocks are whole on every
    rank. Ranks call `block` in the same order. The idea is that of ZeRO's third stage (arXiv 1910.02054).

    Args:
        module: on the meta device.
        blocks: of the module, in the order in which they run.
        everyone: the ranks that share them, on the device.
    """

    shared = True

    def __init__(self, module: nn.Module, blocks: Sequence[nn.Module], everyone: Communicator) -> None:
        self._bytes = BlockBytes(module, blocks, everyone.size)
        self._everyone = everyone
        self._shards: list[Tensor] = []
        self._coming: dict[int, Callable[[], None]] = {}

    @property
    def nbytes(self) -> int:
        """This rank's shares, and what is outside of blocks."""
        return sum(self._bytes.sizes) // self._everyone.size + self._bytes.outside

    @property
    def whole(self) -> int:
        """Bytes of the blocks that are whole now."""
        return self._bytes.whole

    def materialise(self, device: torch.device) -> None:
        """The shares, and what is outside of blocks."""
        self._bytes.materialise(device)
        sizes = [size // self._everyone.size for size in self._bytes.sizes]
        self._shards = [torch.empty(size, dtype=torch.uint8, device=device) for size in sizes]

    def leave(self, here: bool) -> None:
        """The same."""
        if here:
            self._move(HOST)

    def come_back(self) -> None:
        """The same."""
        self._move(self._everyone.device)

    def _move(self, device: torch.device) -> None:
        assert not self._coming, "weights are moved between forwards"
        self._bytes.move_outside(device)
        self._shards = [shard.to(device) for shard in self._shards]

    def run(self, name: str) -> Run:
        """What this rank's share of the block has of the parameter."""
        place = self._bytes.places.get(name)
        if place is None:
            return Run(self._bytes.outer(name).view(-1))
        return place.run(self._bytes.share(place.block, self._everyone.rank), self._shards[place.block])

    def full(self, name: str) -> Tensor:
        """Gathered, into memory of its own. A collective."""
        place = self._bytes.places.get(name)
        if place is None:
            return self._bytes.outer(name)
        parts = [place.within(self._bytes.share(place.block, rank)) for rank in range(self._everyone.size)]
        mine = self.run(name).values.view(torch.uint8)
        flat = self._everyone.gather(mine[None, :, None], [part.stop - part.start for part in parts])
        return flat.view(-1).view(place.dtype).view(place.shape)

    @contextmanager
    def block(self, index: int) -> Iterator[None]:
        """Gather the block, begin the next one's gather, and free it afterwards."""
        for other in [other for other in self._coming if other not in (index, index + 1)]:
            self._coming.pop(other)()  # begun for nothing, where blocks run in another order
            self._bytes.free(other)
        self._begin(index)
        arrive = self._coming.pop(index)
        if index + 1 < len(self._shards):
            self._begin(index + 1)
        arrive()
        yield
        self._bytes.free(index)

    def _begin(self, index: int) -> None:
        if index not in self._coming:
            self._coming[index] = self._everyone.gather_into(self._bytes.allocate(index), self._shards[index])
