"""A rank's memory, on its device and on the host: what is free, moving weights between the two, and running out."""

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
"""What is left free for ComfyUI and everything else."""

KEPT_OF_FREE = 0.25
"""What torch may keep between requests, as a share of what is free on the device beside it; ComfyUI's own measure."""

CGROUP = Path("/sys/fs/cgroup")
"""Where a container's own limit is found (version 2); the machine's free memory is not all its own."""


WINDOWS = Path("/dev/dxg")
"""There where Linux runs under Windows (WSL2)."""

KEPT_UNDER_WINDOWS = 2_000_000_000
"""Bytes of a GPU that Windows says are free and does not give."""

UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}

ALLOCATION = re.compile(r"tried to allocate (\d+(?:\.\d+)?) (bytes|KiB|MiB|GiB)", re.IGNORECASE)
"""How torch's allocators say what they were asked for."""

SHORTAGE = re.compile(
    r"out of memory|(?:CUBLAS|CUDNN)_STATUS_\w*ALLOC(?:ATION)?_FAILED|can(?:'t|not) allocate memory|bad_alloc",
    re.IGNORECASE,
)
"""What CUDA, its libraries, NCCL and torch say in a plain RuntimeError when the device's or the host's memory ran out."""


LOCKED = re.compile(r"ibv_\w+ failed", re.IGNORECASE)
"""What NCCL says where InfiniBand may not lock memory although there is enough."""


class OutOfMemory(torch.OutOfMemoryError):
    """The limit of the plan leaves no room for what is asked for; numbers are bytes."""

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


def asked_bytes(error: BaseException) -> int:
    """Return the bytes requested when memory ran out; 0 if the error does not say."""
    match = ALLOCATION.search(str(error))
    return int(float(match[1]) * UNITS[match[2]]) if match else 0


@dataclass(frozen=True)
class Allowance:
    """What a rank may use of its device: `limit` bytes in all (0: what is free), `working` of them to compute with.

    `sharers` counts the ranks on the same device, this one included.
    """

    limit: int = 0
    working: int = 0
    sharers: int = 1


class RankMemory:
    """The memory of one rank's device and its share of the host's.

    On a CPU rank the device's memory is the host's: weights that it has alone do not move, and only the accounting changes.

    Args:
        device: of this rank.
        local_ranks: ranks on this machine, which may take weights to the host at the same time.
        host_reserve: bytes of host memory that weights taken off a device leave free.
    """

    def __init__(self, device: torch.device, local_ranks: int, host_reserve: int = HOST_RESERVE) -> None:
        self._device = device
        self._local_ranks = local_ranks
        self._host_reserve = host_reserve

    def finish(self) -> None:
        """Wait until the device is done with all it was given."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def limit(self, nbytes: int) -> None:
        """Let this process allocate no more than so many bytes of its GPU; 0 lifts the limit."""
        if self._device.type == "cuda":
            total = torch.cuda.get_device_properties(self._device).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, nbytes / total) if nbytes else 1.0, self._device)

    def free_on_device(self) -> int:
        """Bytes that could still be allocated on the device."""
        if self._device.type != "cuda":
            return available_on_host()
        unused = torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)
        return torch.cuda.mem_get_info(self._device)[0] + unused - (KEPT_UNDER_WINDOWS if WINDOWS.exists() else 0)

    def has_host_room(self, nbytes: int) -> bool:
        """Whether so many bytes for every rank of this machine could be taken of the host."""
        return nbytes * self._local_ranks <= available_on_host() - self._host_reserve

    def to_host(self, weights: WeightStore, here: bool) -> None:
        """Move weights off devices, off this rank's where `here` says so. A collective."""
        weights.leave(here)
        if here:
            self.give_back()

    def give_back(self) -> None:
        """Free what is no longer used, for other processes too."""
        gc.collect()
        _trim_heap()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def trim(self) -> None:
        """Return what torch keeps for later to the device, unless much more is free: others may need it.

        Others are ComfyUI and workers on the same device. It takes 10 to 20 ms, and the next request has to allocate anew.
        """
        if self._device.type != "cuda":
            return
        cached = torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)
        if cached > KEPT_OF_FREE * torch.cuda.mem_get_info(self._device)[0]:
            torch.cuda.empty_cache()


def _trim_heap() -> None:
    """Return freed host memory that the C library keeps for later; others than glibc have no such call."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def available_on_host() -> int:
    """Bytes of host memory to be had without swapping, within the limits of the process and of its container."""
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
