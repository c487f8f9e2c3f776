"""Weights whose blocks are divided over the ranks and gathered for the time of use."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ...comm.communicator import Communicator
from ...errors import Refused
from .block_bytes import BlockBytes
from .host_copy import HOST
from .store import BlockAccess, ParameterRun, WeightStore

NONE = -1
"""Value of the whole block's index while no block is whole."""


class Sharded(WeightStore, BlockAccess):
    """A store in which each rank holds 1/N of every block's bytes. The next block is gathered while this one computes.

    At most two blocks are whole at a time, and none between forwards. Parameters outside of blocks are whole on every rank. The
    idea is that of ZeRO's third stage (arXiv 1910.02054).

    A gather needs all ranks, and ranks may compute different things: other prompts, or another part of the batch. So all ranks
    issue the same gathers, whatever they compute: in every forward each block once, in order. A block that a rank does not run
    is gathered and freed. A block that a rank runs several times in a row stays until a later block is needed. A rank that has
    fewer forwards in a model call than another also gathers the blocks of the forwards that it lacks.

    Args:
        module: on the meta device.
        blocks: blocks of the module, in the order in which they run.
        everyone: the ranks that share the blocks, on the device.
        max_int: returns the largest of all ranks' numbers, a collective. By default all ranks run equally many forwards.
        on_progress: called when a block has arrived, so that a watcher sees progress on a rank that computes nothing.
    """

    shared = True

    def __init__(
        self,
        module: nn.Module,
        blocks: Sequence[nn.Module],
        everyone: Communicator,
        max_int: Callable[[int], int] = int,
        on_progress: Callable[[], object] = lambda: None,
    ) -> None:
        self._bytes = BlockBytes(module, blocks, everyone.size)
        self._everyone = everyone
        self._max_int = max_int
        self._on_progress = on_progress
        self._shards: list[Tensor] = []
        self._gathered = False
        self._whole = NONE
        self._coming: Callable[[], None] | None = None

    @property
    def nbytes(self) -> int:
        """Return the bytes of this rank's shares, and of the tensors outside of blocks."""
        return sum(self._bytes.sizes) // self._everyone.size + self._bytes.outside

    @property
    def whole(self) -> int:
        """Return the bytes of the blocks that are whole now."""
        return self._bytes.whole

    def materialise(self, device: torch.device) -> None:
        """Allocate the shares, and the tensors outside of blocks."""
        self._bytes.materialise(device)
        sizes = [size // self._everyone.size for size in self._bytes.sizes]
        self._shards = [torch.empty(size, dtype=torch.uint8, device=device) for size in sizes]

    def leave(self, here: bool) -> None:
        """Move the shares, and the tensors outside of blocks, to host memory."""
        if here:
            self._move(HOST)

    def come_back(self) -> None:
        """Move the shares, and the tensors outside of blocks, back to the device."""
        self._move(self._everyone.device)

    def _move(self, device: torch.device) -> None:
        assert self._coming is None and self._whole == NONE, "weights are moved between forwards"
        self._bytes.move_outside(device)
        self._shards = [shard.to(device) for shard in self._shards]

    def run(self, name: str) -> ParameterRun:
        """Return the elements of the parameter that are in this rank's share of the block."""
        span = self._bytes.spans.get(name)
        if span is None:
            return ParameterRun(self._bytes.outer(name).view(-1))
        return span.run(self._bytes.share(span.block, self._everyone.rank), self._shards[span.block])

    def full(self, name: str) -> Tensor:
        """Return the gathered parameter, in memory of its own. This is a collective."""
        span = self._bytes.spans.get(name)
        if span is None:
            return self._bytes.outer(name)
        parts = [span.overlap(self._bytes.share(span.block, rank)) for rank in range(self._everyone.size)]
        mine = self.run(name).values.view(torch.uint8)
        flat = self._everyone.all_gather(mine[None, :, None], [part.stop - part.start for part in parts])
        return flat.view(-1).view(span.dtype).view(span.shape)

    def settle(self) -> None:
        """Gather one block, once. The connections take the resources for it now, and not in the middle of a denoise."""
        if not self._gathered:
            self._gathered = True
            self._begin(0)()
            self._bytes.free(0)

    @contextmanager
    def model_call(self, forwards: int) -> Iterator[None]:
        """Match the gathers of the rank that runs the most forwards."""
        most = self._max_int(forwards)
        yield
        for _ in range(most - forwards):
            with self.forward():
                pass

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Gather and free the blocks after the last block that the forward ran."""
        yield
        while self._whole + 1 < len(self._shards):
            self._advance()
        self._leave()

    @contextmanager
    def block(self, index: int) -> Iterator[None]:
        """Gather the blocks up to this one. The block stays until a later block is needed, or until the forward ends.

        Raises:
            Refused: a later block has run in this forward.
        """
        if index < self._whole:
            raise Refused(
                f"the model runs its block {index} of {len(self._shards)} after its block {self._whole}, which sharded weights "
                "do not allow: choose weights replicated or streamed in Parallel Plan."
            )
        while self._whole < index:
            self._advance()
        yield

    def _advance(self) -> None:
        """Make the next block whole in place of this one, and start the gather of the block after it."""
        following = self._whole + 1
        arrive = self._coming or self._begin(following)
        self._leave()
        self._coming = self._begin(following + 1) if following + 1 < len(self._shards) else None
        arrive()
        self._whole = following
        self._on_progress()

    def _leave(self) -> None:
        if self._whole != NONE:
            self._bytes.free(self._whole)
        self._whole = NONE

    def _begin(self, index: int) -> Callable[[], None]:
        if self._everyone.is_traced:
            self._check_number(index)
        return self._everyone.start_all_gather_into(self._bytes.allocate(index), self._shards[index])

    def _check_number(self, index: int) -> None:
        """Raise RuntimeError if ranks gather different blocks. The bytes of a mixed block would have the right shape."""
        mine = torch.full((1, 1, 1), index, device=self._everyone.device)
        numbers = self._everyone.all_gather(mine, [1] * self._everyone.size).flatten().tolist()
        if set(numbers) != {index}:
            raise RuntimeError(f"ranks gather different blocks at once, by rank: {', '.join(map(str, numbers))}")
