"""A module's tensors in host memory while they are off the device. Ranks of a machine with equal tensors share one copy."""

from __future__ import annotations

import logging
import mmap
import os
import weakref
import zlib
from collections.abc import Collection, Iterable, Sequence
from itertools import chain

import torch
from torch import Tensor, nn

from ...comm.communicator import Communicator
from ...transfers import NOT_PINNED, clear_cuda_error
from .block_bytes import ALIGNMENT

WORDS = 1 << 18
"""Number of words of 8 bytes that a digest takes at a time. Weights leave a device for lack of memory, so it is small."""

ODD = 0x9E3779B97F4A7C15 - (1 << 64)
"""An arbitrary odd number. Products with it lose no information (mod 2**64)."""


class HostCopy:
    """Memory that all `sharers` see, with a place for each of a module's parameters and buffers.

    Creating it is a collective. A rank that copies from the memory or to it keeps it pinned as long as the memory lives:
    pinning many gigabytes takes seconds.

    Args:
        tensors: each of the module's tensors once, with the same shapes on all sharers.
        device: the device of this rank.
    """

    def __init__(self, tensors: Collection[Tensor], sharers: Communicator, device: torch.device) -> None:
        self._sharers = sharers
        self._device = device
        self._pinned = False
        self._copies: list[Tensor] = []
        self._memory = shared_bytes(copied_bytes(tensors), sharers, HOST)
        end = 0
        for tensor in tensors:
            like = torch.empty_like(tensor, device="meta")  # dense, with the same order of dimensions
            data = self._memory[end : end + tensor.nbytes].view(tensor.dtype)
            self._copies.append(data.as_strided(like.shape, like.stride()))
            end += _aligned(tensor.nbytes)

    def part(self) -> int:
        """Return the bytes of the memory that one sharer accounts for."""
        return -(-self._memory.numel() // self._sharers.size)

    def fits(self, tensors: Collection[Tensor], sharers: Communicator) -> bool:
        """Return True if the memory has a place for each of these tensors and belongs to these sharers."""
        if sharers is not self._sharers or len(tensors) != len(self._copies):
            return False
        return all(_form(tensor) == _form(copy) for tensor, copy in zip(tensors, self._copies, strict=True))

    def write(self, tensors: Collection[Tensor], writers: Sequence[int]) -> None:
        """Copy the tensors to the memory. Each of the `writers` among the sharers copies its part. This is a collective."""
        if self._sharers.rank in writers:
            self._pin()
        end = 0
        for tensor, copy in zip(tensors, self._copies, strict=True):
            if writers[end * len(writers) // (self._memory.numel() + 1)] == self._sharers.rank:
                copy.copy_(tensor.detach())
            end += _aligned(tensor.nbytes)
        self._sharers.barrier()  # no rank uses the copy before all have written

    def take(self, module: nn.Module) -> None:
        """Let a module, whose tensors these are, use the copies instead of its own tensors."""
        self._pin()  # also if others have written the copy: this rank will read it
        copies = dict(zip(tensors_of(module), self._copies, strict=True))
        module._apply(lambda tensor: copies[id(tensor)])

    def _pin(self) -> None:
        if self._device.type == "cuda" and not self._pinned and self._memory.numel():
            self._pinned = True
            pin(self._memory)


def tensors_of(module: nn.Module) -> dict[int, Tensor]:
    """Return a module's parameters and buffers by id, each once: a module may use a tensor at several places."""
    return {id(tensor): tensor for tensor in chain(module.parameters(), module.buffers())}


def copied_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the number of bytes that a copy of the tensors takes."""
    return sum(_aligned(tensor.nbytes) for tensor in tensors)


def bring_back(module: nn.Module, device: torch.device) -> None:
    """Copy a module's tensors to memory of its own on a device."""
    moved: dict[int, Tensor] = {}

    def to_device(tensor: Tensor) -> Tensor:
        if id(tensor) not in moved:
            moved[id(tensor)] = tensor.to(device, copy=True)
        return moved[id(tensor)]

    module._apply(to_device)


def digest(tensors: Iterable[Tensor], device: torch.device) -> tuple[int, int]:
    """Return a digest of tensors on a device: two numbers that change with the tensors' shapes, dtypes or bits."""
    generator = torch.Generator().manual_seed(0)
    factors = torch.randint(-(1 << 63), (1 << 63) - 1, (WORDS,), generator=generator).bitwise_or(1).to(device)
    scratch = torch.empty(8 * WORDS, dtype=torch.uint8, device=device)
    total = torch.zeros((), dtype=torch.int64, device=device)
    form = 0
    for tensor in tensors:
        form = zlib.crc32(f"{tuple(tensor.shape)} {tensor.dtype}".encode(), form)
        for piece in tensor.detach().contiguous().view(-1).view(torch.uint8).split(8 * WORDS):
            size = -(-piece.numel() // 8)
            scratch[8 * size - 8 : 8 * size].zero_()  # pads the piece's last word
            scratch[: piece.numel()].copy_(piece)
            integers = scratch[: 8 * size].view(torch.int64)
            total.mul_(ODD).add_((integers * factors[:size]).sum())
    return form, int(total)


def _form(tensor: Tensor) -> tuple[torch.dtype, torch.Size, tuple[int, ...]]:
    return tensor.dtype, tensor.shape, torch.empty_like(tensor, device="meta").stride()


def _aligned(count: int) -> int:
    return -(-count // ALIGNMENT) * ALIGNMENT


log = logging.getLogger(__name__)

HOST = torch.device("cpu")

PORTABLE = 1
"""cudaHostRegisterPortable: the memory is pinned for all GPUs that this process uses."""


def shared_bytes(nbytes: int, sharers: Communicator, device: torch.device) -> Tensor:
    """Return bytes (uint8) that all sharers see. Sharers are processes of one user on this machine. This is a collective.

    The kernel provides the memory (memfd). It takes nothing from /dev/shm, which is small in containers, and is freed with its
    last user. If `device` is a GPU, the memory is pinned for it.
    """
    if not nbytes:
        return torch.empty(0, dtype=torch.uint8)
    descriptor = -1
    if sharers.rank == 0:
        descriptor = os.memfd_create("parallel weights", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, nbytes)
    where = torch.tensor([[[os.getpid()], [descriptor]]])
    process, number = sharers.all_gather(where, [2] * sharers.size)[0, :2, 0].tolist()
    if sharers.rank:
        descriptor = os.open(f"/proc/{process}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
    memory = mmap.mmap(descriptor, nbytes)
    sharers.barrier()  # the others have opened it now
    os.close(descriptor)
    data = torch.frombuffer(memory, dtype=torch.uint8)
    if device.type == "cuda":
        pin(data)
    return data


def pin(data: Tensor) -> None:
    """Pin memory for as long as it lives, so that the GPU's copy engine can use it.

    If the system forbids that, copies are slower and make the host wait.
    """
    cudart, address = torch.cuda.cudart(), data.data_ptr()
    if error := int(cudart.cudaHostRegister(address, data.nbytes, PORTABLE)):
        log.warning("Parallel: of %d bytes, %s (CUDA error %d)", data.nbytes, NOT_PINNED, error)
        clear_cuda_error()
    else:
        weakref.finalize(data.untyped_storage(), cudart.cudaHostUnregister, address).atexit = False
