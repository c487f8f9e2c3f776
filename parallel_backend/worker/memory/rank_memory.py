"""A rank's memory on its device and on the host: free memory, moves of weights between the two, and errors of memory."""

from __future__ import annotations

import ctypes
import errno
import gc
import re
import resource
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from ...weights.stores.store import WeightStore

HOST_RESERVE = 4 << 30
"""Bytes of host memory that stay free for ComfyUI and other programs."""

KEPT_OF_FREE = 0.25
"""Largest cache of torch between requests, as a fraction of the device's free memory. ComfyUI uses the same limit."""

CGROUP = Path("/sys/fs/cgroup")
"""The folder with a container's memory limit (cgroup version 2). A container may not use all memory of the machine."""


WINDOWS = Path("/dev/dxg")
"""A file that exists if Linux runs under Windows (WSL2)."""

KEPT_UNDER_WINDOWS = 2_000_000_000
"""Bytes of a GPU that Windows reports as free and does not provide."""

UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}

ALLOCATION = re.compile(r"tried to allocate (\d+(?:\.\d+)?) (bytes|KiB|MiB|GiB)", re.IGNORECASE)
"""The part of an error of torch's allocators that names the requested size."""

SHORTAGE = re.compile(
    r"out of memory|(?:CUBLAS|CUDNN)_STATUS_\w*ALLOC(?:ATION)?_FAILED|can(?:'t|not) allocate memory|bad_alloc",
    re.IGNORECASE,
)
"""Messages of plain RuntimeErrors of CUDA, its libraries, NCCL and torch if device or host memory ran out."""


LOCKED = re.compile(r"ibv_\w+ failed", re.IGNORECASE)
"""The message of NCCL if InfiniBand may not lock memory, although there is enough."""


class OutOfMemory(torch.OutOfMemoryError):
    """Raised if a request needs more memory than the plan's limit. The numbers are bytes."""

    def __init__(self, requested: int, limit: int) -> None:
        super().__init__(f"Tried to allocate {requested} bytes under a limit of {limit} bytes")


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if memory ran out, on the device or on the host."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    message = str(error)
    return isinstance(error, RuntimeError) and SHORTAGE.search(message) is not None and LOCKED.search(message) is None


def failed_allocation_bytes(error: BaseException) -> int:
    """Return the bytes requested when memory ran out; 0 if the error does not say."""
    match = ALLOCATION.search(str(error))
    return int(float(match[1]) * UNITS[match[2]]) if match else 0


@dataclass(frozen=True)
class Allowance:
    """The memory that a rank may use of its device.

    Attributes:
        limit: the bytes in all; 0 for all free memory.
        working: the bytes for the computation, which are part of the limit.
        sharers: the number of ranks on the same device, this one included.
    """

    limit: int = 0
    working: int = 0
    sharers: int = 1


class RankMemory:
    """The memory of one rank's device and its share of the host's.

    On a CPU rank, the device's memory is the host's. Weights that only this rank has do not move, and only the accounting
    changes.

    Args:
        device: the rank's device.
        local_ranks: the number of ranks on this machine, which may move weights to the host at the same time.
        host_reserve: bytes of host memory that must stay free when weights move there.
    """

    def __init__(self, device: torch.device, local_ranks: int, host_reserve: int = HOST_RESERVE) -> None:
        self._device = device
        self._local_ranks = local_ranks
        self._host_reserve = host_reserve

    def finish(self) -> None:
        """Wait until the device has finished all its work."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def limit(self, nbytes: int) -> None:
        """Limit the bytes that this process may allocate on its GPU; 0 removes the limit."""
        if self._device.type == "cuda":
            total = torch.cuda.get_device_properties(self._device).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, nbytes / total) if nbytes else 1.0, self._device)

    def free_on_device(self) -> int:
        """Return the bytes that can still be allocated on the device."""
        if self._device.type != "cuda":
            return available_on_host()
        unused = torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)
        return torch.cuda.mem_get_info(self._device)[0] + unused - (KEPT_UNDER_WINDOWS if WINDOWS.exists() else 0)

    def has_host_room(self, nbytes: int) -> bool:
        """Return True if the host has room for `nbytes` of each rank of this machine, besides the reserve."""
        return nbytes * self._local_ranks <= available_on_host() - self._host_reserve

    def to_host(self, weights: WeightStore, here: bool) -> None:
        """Move weights off devices. `here` is True if they leave this rank's device. A collective."""
        weights.leave(here)
        if here:
            self.give_back()

    def give_back(self) -> None:
        """Return unused memory to the system and the device, so that other processes can use it."""
        gc.collect()
        _trim_heap()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def trim(self) -> None:
        """Return torch's cached memory to the device, unless much more is free.

        ComfyUI and other workers on the device may need it. This takes 10 to 20 ms, and the next request must allocate again.
        """
        if self._device.type != "cuda":
            return
        cached = torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)
        if cached > KEPT_OF_FREE * torch.cuda.mem_get_info(self._device)[0]:
            torch.cuda.empty_cache()


def _trim_heap() -> None:
    """Return freed host memory that the C library caches to the system. Only glibc has this call."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def available_on_host() -> int:
    """Return the bytes of host memory that are available without swapping, within the limits of process and container."""
    available: int = psutil.virtual_memory().available
    address_space, _ = resource.getrlimit(resource.RLIMIT_AS)
    if address_space != resource.RLIM_INFINITY:
        available = min(available, max(0, address_space - psutil.Process().memory_info().vms))
    try:
        limit = (CGROUP / "memory.max").read_text().strip()
        used = int((CGROUP / "memory.current").read_text())
        statistics = dict(line.split() for line in (CGROUP / "memory.stat").read_text().splitlines())
    except OSError:
        return available
    return available if limit == "max" else min(available, int(limit) - used + int(statistics["inactive_file"]))
