"""NCCL's ways through host memory, between GPUs that do not reach each other's: each is tried once, and the fastest is kept.

NCCL reads these settings once in a process (NCCL's list of environment variables), so each is tried in processes of its own.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import permutations
from typing import Protocol

import msgspec
import torch

from ...cache import DiskCache
from ...temporary import memory_file, path_of

FASTER = 1.1
"""By how much a way has to be faster than NCCL's own choice."""

SECONDS = 50.0
"""For one trial, the start of its processes included."""

SENDS, BOTH = "1", "3"
WAYS: Sequence[Mapping[str, str]] = (
    {},
    {"NCCL_SHM_USE_CUDA_MEMCPY": "1", "NCCL_SHM_MEMCPY_MODE": SENDS},
    {"NCCL_SHM_USE_CUDA_MEMCPY": "1", "NCCL_SHM_MEMCPY_MODE": BOTH},
)
"""NCCL's own choice; copies by the GPUs' copy engines where a GPU sends, and where it receives as well."""

log = logging.getLogger(__name__)


class TransportRanks(Protocol):
    """The part of a ProcessGroup that is needed here."""

    rank: int
    size: int

    def all_gather_text(self, text: str) -> list[str]:
        """Return every rank's text, in rank order."""

    def broadcast_flag(self, flag: bool) -> bool:
        """Return rank 0's flag on every rank."""


class HostTransport(msgspec.Struct, frozen=True):
    """The settings that were the fastest, and the bytes/s of each way; 0 for one that failed."""

    settings: dict[str, str]
    speeds: tuple[float, ...]


def cached_transport(world_size: int) -> HostTransport | None:
    """What was found for so many workers on this machine's GPUs; None if nothing was."""
    return _store().read(_key(world_size))


def has_transports(group: TransportRanks, machines: Sequence[int], device: torch.device) -> bool:
    """Whether there are ways to try, and none was tried before. A collective."""
    devices = group.all_gather_text(str(device))
    return group.broadcast_flag(
        through_host(devices, machines, os.environ, _reach) and cached_transport(group.size) is None
    )


def through_host(
    devices: Sequence[str], machines: Sequence[int], variables: Iterable[str], reach: Callable[[str, str], bool]
) -> bool:
    """Return True if the ranks are GPUs of one machine without peer access and the environment chooses no NCCL transport.

    Args:
        devices, machines: of each rank.
        variables: the names in the environment.
        reach: whether the first GPU reaches the second one's memory.
    """
    gpus = {device for device in devices if device.startswith("cuda")}
    chosen = any(name.startswith(("NCCL_SHM_", "NCCL_P2P_")) for name in variables)
    gpus_of_one_machine = len(gpus) == len(devices) > 1 and len(set(machines)) == 1
    return gpus_of_one_machine and not chosen and not any(reach(*pair) for pair in permutations(sorted(gpus), 2))


def benchmark_transports(
    group: TransportRanks,
    device: torch.device,
    on_progress: Callable[[], None],
    ways: Sequence[Mapping[str, str]] = WAYS,
) -> HostTransport:
    """Try each way, the first being NCCL's own choice, and keep the fastest. A collective; all ranks get the same."""
    speeds = []
    for settings in ways:
        with memory_file("way") as descriptor:
            file = group.all_gather_text(str(path_of(descriptor, os.getpid())))[0]
            every = group.all_gather_text(_trial(group.rank, group.size, device, file, settings))
        speeds.append(min(map(float, every)) if all(every) else 0.0)
        on_progress()
    best = max(range(len(ways)), key=speeds.__getitem__)
    way = HostTransport(dict(ways[best if speeds[best] >= FASTER * speeds[0] else 0]), tuple(speeds))
    if group.rank == 0:
        _store().write(_key(group.size), way)
        log.info("NCCL's ways through host memory: %s GB/s", ", ".join(f"{speed / 1e9:.1f}" for speed in speeds))
    return way


def _trial(rank: int, world_size: int, device: torch.device, file: str, settings: Mapping[str, str]) -> str:
    """What this rank's process says, bytes/s; empty if it failed."""
    command = [
        sys.executable,
        "-m",
        "parallel_backend.worker.link_trial",
        str(rank),
        str(world_size),
        str(device),
        file,
    ]
    try:
        done = subprocess.run(
            command, env=os.environ | settings, capture_output=True, text=True, timeout=SECONDS, check=True
        )
        return str(float(done.stdout))
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        log.info("A way through host memory failed with %s: %s", dict(settings), error)
        return ""


def _reach(device: str, peer: str) -> bool:
    return torch.cuda.can_device_access_peer(torch.device(device), torch.device(peer))


def _store() -> DiskCache[HostTransport]:
    return DiskCache("hostway", HostTransport)


def _key(world_size: int) -> str:
    names = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    return "\n".join([str(world_size), *names, torch.__version__, str(torch.version.cuda)])
