"""A rank's memory, on its device and on the host: what is free, moving weights between the two, and running out."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
from torch import nn

HOST = torch.device("cpu")

HOST_RESERVE = 4 << 30
"""Bytes of host memory that weights taken off a device leave free for ComfyUI and everything else."""

CGROUP = Path("/sys/fs/cgroup")
"""Where a container's own limit is found (version 2); the machine's free memory is not all its own."""


class OutOfMemory(torch.OutOfMemoryError):
    """More was asked for than is free, both in bytes."""

    def __init__(self, asked: int, free: int) -> None:
        super().__init__(f"{asked} bytes were asked for and {free} are free")
        self.asked = asked
        self.free = free


@dataclass(frozen=True)
class Allowance:
    """What a rank may use of its device: `limit` bytes in all (0: what is free), `working` of them to compute with.

    `sharers` counts the ranks on the same device, this one included.
    """

    limit: int = 0
    working: int = 0
    sharers: int = 1


class Memory:
    """The memory of one rank's device and its share of the host's.

    On a CPU rank the device's memory is the host's: moving copies nothing, and only the accounting changes.

    Args:
        device: of this rank.
        local_ranks: ranks on this machine, which may take weights to the host at the same time.
    """

    def __init__(self, device: torch.device, local_ranks: int) -> None:
        self._device = device
        self._local_ranks = local_ranks

    def free_on_device(self) -> int:
        """Bytes that could still be allocated on the device."""
        if self._device.type != "cuda":
            return available_on_host()
        unused = torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)
        return torch.cuda.mem_get_info(self._device)[0] + unused

    def has_host_room(self, nbytes: int) -> bool:
        """Whether every rank of this machine could take so many bytes to the host."""
        return nbytes * self._local_ranks <= available_on_host() - HOST_RESERVE

    def to_host(self, module: nn.Module) -> None:
        """Move a module's weights, shards included, off the device."""
        module.to(HOST)
        self.give_back()

    def to_device(self, module: nn.Module) -> None:
        """Move a module's weights back."""
        module.to(self._device)

    def give_back(self) -> None:
        """Return what is no longer used to the device, for other processes."""
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()


def available_on_host() -> int:
    """Bytes of host memory to be had without swapping, within the container's limit where there is one."""
    available: int = psutil.virtual_memory().available
    try:
        limit = (CGROUP / "memory.max").read_text().strip()
        used = int((CGROUP / "memory.current").read_text())
        statistics = dict(line.split() for line in (CGROUP / "memory.stat").read_text().splitlines())
    except OSError:
        return available
    return available if limit == "max" else min(available, int(limit) - used + int(statistics["inactive_file"]))
