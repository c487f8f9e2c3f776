"""A module's tensors in host memory while they are off the device: one copy a machine where its ranks have the same."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from itertools import chain

import torch
from torch import Tensor, nn

from ...comm.communicator import Communicator
from .block_bytes import ALIGNMENT
from .host_memory import HOST, pin, shared_bytes

WORDS = 1 << 18
"""What a digest takes at a time, in words of 8 bytes: what leaves a device does so for want of room."""

ODD = 0x9E3779B97F4A7C15 - (1 << 64)
"""Any odd number: products with it lose nothing (mod 2**64)."""


class HostCopy:
    """Where a module's parameters and buffers lie in memory that all `sharers` see; a collective.

    Args:
        tensors: each of them once, by its id; of the same shapes on all sharers.
        writers: the sharers that write it, each its part; none has it before the others have.
        device: of this rank.
    """

    def __init__(
        self, tensors: Mapping[int, Tensor], sharers: Communicator, writers: Iterable[int], device: torch.device
    ) -> None:
        self._device = device
        self._memory = shared_bytes(copied_bytes(tensors.values()), sharers, HOST)
        self._pinned = False
        self._views: dict[int, Tensor] = {}
        writers, end = [*writers], 0
        if sharers.rank in writers:
            self._pin()
        for key, tensor in tensors.items():
            like = torch.empty_like(tensor, device="meta")  # dense, its dimensions in the same order
            data = self._memory[end : end + tensor.nbytes].view(tensor.dtype)
            self._views[key] = view = data.as_strided(like.shape, like.stride())
            if writers[end * len(writers) // (self._memory.numel() + 1)] == sharers.rank:
                view.copy_(tensor.detach())
            end += _aligned(tensor.nbytes)
        sharers.barrier()

    def take(self, module: nn.Module) -> None:
        """Let the module, whose tensors they are, have these instead of its own."""
        self._pin()  # also where others have written it: it will be read
        module._apply(lambda tensor: self._views[id(tensor)])

    def _pin(self) -> None:
        if self._device.type == "cuda" and not self._pinned and self._memory.numel():
            self._pinned = True
            pin(self._memory)


def tensors_of(module: nn.Module) -> dict[int, Tensor]:
    """A module's parameters and buffers by their ids: some are at several places of it."""
    return {id(tensor): tensor for tensor in chain(module.parameters(), module.buffers())}


def copied_bytes(tensors: Iterable[Tensor]) -> int:
    """What a copy of them takes."""
    return sum(_aligned(tensor.nbytes) for tensor in tensors)


def bring_back(module: nn.Module, device: torch.device) -> None:
    """Copy a module's tensors to memory of its own."""
    moved: dict[int, Tensor] = {}

    def to_device(tensor: Tensor) -> Tensor:
        if id(tensor) not in moved:
            moved[id(tensor)] = tensor.to(device, copy=True)
        return moved[id(tensor)]

    module._apply(to_device)


def digest(tensors: Iterable[Tensor], device: torch.device) -> tuple[int, int]:
    """Two numbers that are others for other shapes, types or bits of tensors on a device."""
    generator = torch.Generator().manual_seed(0)
    factors = torch.randint(-(1 << 63), (1 << 63) - 1, (WORDS,), generator=generator).bitwise_or(1).to(device)
    scratch = torch.empty(8 * WORDS, dtype=torch.uint8, device=device)
    total = torch.zeros((), dtype=torch.int64, device=device)
    form = 0
    for tensor in tensors:
        form = zlib.crc32(f"{tuple(tensor.shape)} {tensor.dtype}".encode(), form)
        for piece in tensor.detach().contiguous().view(-1).view(torch.uint8).split(8 * WORDS):
            size = -(-piece.numel() // 8)
            scratch[8 * size - 8 : 8 * size].zero_()  # what is behind the piece in its last word
            scratch[: piece.numel()].copy_(piece)
            words = scratch[: 8 * size].view(torch.int64)
            total.mul_(ODD).add_((words * factors[:size]).sum())
    return form, int(total)


def _aligned(count: int) -> int:
    return -(-count // ALIGNMENT) * ALIGNMENT
