"""Weights in host memory, one copy for each machine. The device has a window of their blocks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate

import torch
from torch import Tensor, nn

from ...comm.communicator import Communicator
from ...comm.meter import Meter
from .block_bytes import BlockBytes
from .host_copy import HOST, shared_bytes
from .store import BlockAccess, ParameterRun, WeightStore


class Streamed(WeightStore, BlockAccess):
    """A store of blocks in host memory, shared by the ranks of a machine. Blocks are copied to the device one ahead of use.

    The device has a window of blocks: two that come and go, and as many that stay as fit. Those that stay are spread evenly, so
    that copies run while blocks are computed that need no copy. Each rank fills and changes its own part of the host's copy.
    Parameters outside of blocks are on every rank's device.

    Args:
        module: on the meta device.
        blocks: blocks of the module, in the order in which they run.
        sharers: the ranks of this machine that hold the same blocks, on CPU tensors.
        device: the device of this rank.
        meter: counts the bytes that are copied.
    """

    shared = True

    def __init__(
        self,
        module: nn.Module,
        blocks: Sequence[nn.Module],
        sharers: Communicator,
        device: torch.device,
        meter: Meter,
    ) -> None:
        self._bytes = BlockBytes(module, blocks, sharers.size)
        self._sharers = sharers
        self._device = device
        self._meter = meter
        self._copies = Copies(device)
        self._host: list[Tensor] = []
        self._stays: frozenset[int] = frozenset()
        self._there: dict[int, Callable[[], None]] = {}
        """Block on the device, or on its way -> a function that waits for it."""

    @property
    def nbytes(self) -> int:
        """Return the bytes of the tensors outside of blocks, and of the two largest blocks, which come and go."""
        return self._bytes.outside + self._passing

    @property
    def beyond(self) -> int:
        """Return the bytes of the blocks on the device that stay there."""
        return sum(self._bytes.sizes[block] for block in self._stays if block in self._there)

    @property
    def movable(self) -> int:
        """Return the bytes of the tensors outside of blocks. Blocks are in host memory already."""
        return self._bytes.outside

    @property
    def kept(self) -> int:
        """Return the bytes of this rank's part of the machine's copy."""
        return sum(self._bytes.sizes) // self._sharers.size

    @property
    def whole(self) -> int:
        """Return the bytes of the blocks that are on the device now."""
        return self._bytes.whole

    @property
    def _passing(self) -> int:
        return sum(sorted(self._bytes.sizes)[-2:])

    def fit(self, spare: int) -> int:
        """Let as many blocks stay as fit into `spare` bytes, and return the bytes left over.

        If all blocks fit, none comes and goes.
        """
        everything = sum(self._bytes.sizes)
        self._stays = staying(self._bytes.sizes, everything if spare + self._passing >= everything else spare)
        self._leave_all_but(self._stays)
        return max(0, spare - sum(self._bytes.sizes[block] for block in self._stays))

    def materialise(self, device: torch.device) -> None:
        """Allocate the host's copy, and the tensors outside of blocks."""
        assert device == self._device
        self._bytes.materialise(device)
        memory = shared_bytes(sum(self._bytes.sizes), self._sharers, device)
        ends = list(accumulate(self._bytes.sizes))
        self._host = [memory[end - size : end] for end, size in zip(ends, self._bytes.sizes, strict=True)]

    def leave(self, here: bool) -> None:
        """Move the tensors outside of blocks to host memory. No block stays on the device."""
        if here:
            self._leave_all_but(())
            self._bytes.move_outside(HOST)

    def come_back(self) -> None:
        """Move the tensors outside of blocks back to the device."""
        self._bytes.move_outside(self._device)

    def run(self, name: str) -> ParameterRun:
        """Return this rank's part of the host's copy. The block's copy on the device becomes stale and is freed."""
        span = self._bytes.spans.get(name)
        if span is None:
            return ParameterRun(self._bytes.outer(name).view(-1))
        if span.block in self._there:
            self._leave(span.block)
        share = self._bytes.share(span.block, self._sharers.rank)
        return span.run(share, self._host[span.block][share])

    def settle(self) -> None:
        """Wait until all ranks have written their parts."""
        self._sharers.barrier()

    def full(self, name: str) -> Tensor:
        """Return a copy of the host's values. This is a collective."""
        span = self._bytes.spans.get(name)
        if span is None:
            return self._bytes.outer(name)
        self.settle()
        values = span.values(self._host[span.block]).clone()
        self.settle()
        return values

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Free the blocks that do not stay when the forward ends."""
        yield
        self._leave_all_but(self._stays)

    @contextmanager
    def block(self, index: int) -> Iterator[None]:
        """Bring a block to the device, and start to copy the next block that is not there.

        The block stays until another block is needed, so a block that runs several times in a row is copied once.
        """
        stays, there = self._stays, self._there
        passing = [block for block in there if block not in stays and block > index]  # in order: the next comes first
        passing = passing[: 1 if index not in stays else 2]
        self._leave_all_but((*stays, index, *passing))
        self._come(index)
        following = next((block for block in range(index + 1, len(self._host)) if block not in there), None)
        if following is not None and (following in stays or len(passing) + (index not in stays) < 2):
            self._come(following)
        with self._meter.wait("weights"):
            there[index]()
        there[index] = _nothing
        yield

    def _come(self, block: int) -> None:
        if block not in self._there:
            self._there[block] = self._copies.start(self._bytes.allocate(block), self._host[block])
            self._meter.sent["weights"] += self._bytes.sizes[block]

    def _leave(self, block: int) -> None:
        self._there.pop(block)()
        self._bytes.free(block)

    def _leave_all_but(self, blocks: Collection[int]) -> None:
        for block in [block for block in self._there if block not in blocks]:
            self._leave(block)


class Copies:
    """Copies from pinned host memory on a CUDA stream of their own. On the CPU, which has no streams, a copy is immediate."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def start(self, target: Tensor, source: Tensor) -> Callable[[], None]:
        """Start a copy after the work that the device has so far. Return a function that makes later work wait for the copy."""
        if self._stream is None:
            target.copy_(source)
            return _nothing
        self._stream.wait_stream(torch.cuda.current_stream(self._device))  # which may use the target's memory
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
            done = self._stream.record_event()
        return lambda: torch.cuda.current_stream(self._device).wait_event(done)


def staying(sizes: Sequence[int], spare: int) -> frozenset[int]:
    """Return the blocks that stay in `spare` bytes: the first block, and others at even distances."""
    part, before, used = spare / max(1, sum(sizes)), 0, 0
    stays = set()
    for block, size in enumerate(sizes):
        if used <= part * before and used + size <= spare:
            stays.add(block)
            used += size
        before += size
    return frozenset(stays)


def _nothing() -> None:
    pass
