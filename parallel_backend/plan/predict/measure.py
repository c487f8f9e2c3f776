"""The speed of this machine's devices and links. Workers measure it once, in about two seconds, and a cache folder keeps it."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol, TypeVar

import msgspec
import torch
from torch import Tensor

from ...cache import DiskCache
from ...comm.device_events import DeviceEvents
from ...transfers import empty_pinned
from ..plan import COMPILER
from .cards import quantised_rates, reached_by
from .known_machines import OVERLAP
from .profiles import WAVE, Device, Level, Profile

BUDGET = 0.2
"""The largest number of seconds for one measurement (a single run may take longer)."""

MODEL_OPERATION = 6
"""Host time of an operation inside diffusers' modules, as a multiple of a bare operation (19 µs to 3 µs on one CPU core)."""

FASTER_THAN_PCIE = 6e10
"""Bytes/s that only NVLink reaches."""

KERNEL_BYTES = 0.3e9
"""Device memory that a worker takes after its start, besides the model.

It holds kernels, which are loaded at their first use, workspaces of cuBLAS and cuDNN, and fragments that the allocator cannot
use.
"""

HEAD_DIM = 128
"""The head_dim of nearly every model."""

FLOAT = 4
"""Bytes of the elements sent."""


class Machine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The measured speed of a machine, that of the slowest of `ranks` workers, which are all measured at once.

    Free memory is not part of it, because that is read for each run.

    Attributes:
        matmul: FLOP/s of matmul.
        attention: FLOP/s of attention.
        bandwidth: bytes/s of device memory.
        launch: seconds of host time for one operation of a model.
        ranks: the number of workers.
        link_bandwidth: bytes/s out of one rank in an all-to-all of all ranks.
        link_latency: seconds of an all-to-all of one element.
        connection: bytes of GPU memory that a communicator takes for each peer (NCCL: from some 25 MB over PCIe to 0.4 GB over
            NVLink).
        host_bandwidth: bytes/s from pinned host memory.
        kinds: the names of the ranks' devices. Devices of one name are assumed to be equally fast.
    """

    matmul: float
    attention: float
    bandwidth: float
    launch: float
    ranks: int
    link_bandwidth: float
    link_latency: float
    connection: float
    host_bandwidth: float
    kinds: tuple[str, ...]


class BlockTimes(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The measured seconds of a model's blocks.

    Attributes:
        seconds: seconds of one block of each kind on each rank, `[rank][kind]`. For an unsharded model, seconds of one forward
            for each of two numbers of rows, `[rank][number]`.
        counts: the number of blocks of each kind in the model. For an unsharded model, the two numbers of rows.
        together: an unsharded model computes the rows of a batch together.
    """

    seconds: tuple[tuple[float, ...], ...]
    counts: tuple[int, ...]
    together: bool = False


Measurement = TypeVar("Measurement", Machine, BlockTimes)


class MeasuredRanks(Protocol):
    """The methods of a Communicator that a measurement uses."""

    @property
    def size(self) -> int:
        """Return the number of ranks."""

    def all_to_all(self, send: Tensor, send_sizes: Sequence[int], receive_sizes: Sequence[int]) -> Tensor:
        """Send the k-th piece of a flat tensor to rank k, and return the received pieces in rank order."""

    def all_gather(self, local: Tensor, sizes: Sequence[int]) -> Tensor:
        """Return the tensors `[1, n, 1]` of all ranks, concatenated along dim 1."""


def measure(
    device: torch.device,
    ranks: MeasuredRanks,
    connection: float,
    kinds: Sequence[str],
    attend: Callable[[Tensor, Tensor, Tensor], object],
) -> Machine:
    """Measure this machine. A collective: all ranks call it and return the same result.

    Args:
        device: this rank's device.
        ranks: the ranks.
        connection: bytes that each connection of this rank's communicators took.
        kinds: the names of the ranks' devices.
        attend: the attention kernel that models use here. Its arguments are q, k and v `[batch, tokens, heads, HEAD_DIM]`, in
            bf16 on GPUs and in fp32 on CPUs.
    """
    gpu = device.type == "cuda"
    side, tokens, dtype = (4096, 4096, torch.bfloat16) if gpu else (256, 256, torch.float32)
    matrix = torch.randn(side, side, device=device, dtype=dtype)
    heads = torch.randn(1, tokens, 8, HEAD_DIM, device=device, dtype=dtype)
    large = torch.zeros(1 << (26 if gpu else 22), device=device)
    host = empty_pinned(large.shape, large.dtype).zero_() if gpu else torch.zeros_like(large)
    small = torch.zeros(1, device=device)
    bandwidth, latency = link_speed(device, ranks)
    rates = {
        "matmul": 2 * side**3 / _seconds(lambda: matrix @ matrix, device),
        "attention": 4 * heads.shape[2] * tokens**2 * HEAD_DIM / _seconds(lambda: attend(heads, heads, heads), device),
        "bandwidth": 2 * large.nbytes / _seconds(lambda: large.add_(1), device),
        "link_bandwidth": bandwidth,
        "host_bandwidth": large.nbytes / _seconds(lambda: large.copy_(host, non_blocking=True), device),
    }
    times = {"launch": MODEL_OPERATION * _host_seconds(lambda: small.add_(1), device), "link_latency": latency}
    times["connection"] = connection
    worst = {name: min(_of_all(value, device, ranks)) for name, value in rates.items()}
    worst |= {name: max(_of_all(value, device, ranks)) for name, value in times.items()}
    return Machine(ranks=ranks.size, kinds=tuple(kinds), **worst)


def cached(
    key: str, kind: type[Measurement], find: Callable[[], Measurement], folder: Path | None = None
) -> Measurement:
    """Return the cached measurement of a key, or else measure by `find()` and cache that. An unreadable file is replaced."""
    before = kept(key, kind, folder)
    if before is not None:
        return before
    measured = find()
    _store(kind, folder).write(_key(key, kind), measured)
    return measured


def kept(key: str, kind: type[Measurement], folder: Path | None = None) -> Measurement | None:
    """Return the cached measurement of a key; None if there is none, or if the file cannot be read."""
    return _store(kind, folder).read(_key(key, kind))


def forget_all(folder: Path | None = None) -> None:
    """Delete all cached measurements, so that they are made anew when needed."""
    _store(Machine, folder).forget()
    _store(BlockTimes, folder).forget()


def _store(kind: type[Measurement], folder: Path | None) -> DiskCache[Measurement]:
    return DiskCache(kind.__name__.lower(), kind, folder)


def _key(key: str, kind: type[Measurement]) -> str:
    return f"{kind.__name__}\n{key}"


def machine_key(devices: Sequence[str], attention: str) -> str:
    """Return the cache key of a machine's measurement.

    The key has the devices and their models in rank order, the versions of torch and CUDA, the head_dim, and the choice of
    attention kernel.
    """
    names = [device_kind(name) for name in devices]
    heads = f"heads of {HEAD_DIM} by {attention}"
    return "\n".join([*devices, *names, torch.__version__, str(torch.version.cuda), heads])


def device_kind(device: str) -> str:
    """Return the name of a GPU's model; for a CPU, or a device of another machine, the name of this machine."""
    return torch.cuda.get_device_name(device) if device.startswith("cuda") else platform.node()


def measured_profile(
    machine: Machine,
    memory: tuple[float, ...],
    gpus: bool,
    paces: tuple[float, ...] = (),
    compiler: str = "",
) -> Profile:
    """Return the measured machine as a profile.

    The overlap of transfers with compute is not measured; known machines with similar links supply it.

    Args:
        machine: the measurement.
        memory: bytes that a job may use of each rank's device now.
        gpus: True if the workers are on GPUs.
        paces: as in `Profile`.
        compiler: the backend that compiles blocks; empty if they are not compiled. COMPILER alone fuses operations.
    """
    overlap = 1.0 if machine.link_bandwidth > FASTER_THAN_PCIE else OVERLAP
    return Profile(
        name="this machine",
        device=Device(
            machine.matmul,
            machine.attention,
            machine.bandwidth,
            min(memory),
            machine.launch,
            KERNEL_BYTES if gpus else 0.0,
            machine.connection,
            machine.host_bandwidth,
            WAVE if gpus else 1,
            reached_by(machine.kinds) if gpus else 1.0,
            quantised_rates(machine.kinds, machine.matmul) if gpus else {},
        ),
        levels=(Level(machine.ranks, machine.link_bandwidth, machine.link_latency),),
        overlap=overlap,
        paces=paces,
        free=memory,
        compiled=compiler == COMPILER,
        compares_compiled=gpus and not compiler,
    )


def _of_all(value: float, device: torch.device, ranks: MeasuredRanks) -> list[float]:
    """Return every rank's value."""
    local = torch.tensor([[[value]]], dtype=torch.float64, device=device)
    return [float(entry) for entry in ranks.all_gather(local, [1] * ranks.size).flatten()]


def link_speed(device: torch.device, link: MeasuredRanks) -> tuple[float, float]:
    """Return bytes/s out of one rank, and the seconds of a one-element all-to-all.

    A collective: every rank runs the same number of all-to-alls.
    """

    def seconds(elements: int, runs: int) -> float:
        sizes = [elements] * link.size
        send = torch.zeros(elements * link.size, device=device)
        link.all_to_all(send, sizes, sizes)
        _finish(device)
        start = time.perf_counter()
        for _ in range(runs):
            link.all_to_all(send, sizes, sizes)
        _finish(device)
        return (time.perf_counter() - start) / runs

    elements = (1 << (24 if device.type == "cuda" else 18)) // link.size
    latency = seconds(1, 20)
    transfer = max(seconds(elements, 5) - latency, 1e-9)
    return FLOAT * elements * (link.size - 1) / transfer, latency


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of the shortest of several runs on the device."""
    work()
    _finish(device)
    events = DeviceEvents(device)
    best, end = float("inf"), time.perf_counter() + BUDGET
    while True:
        events.record()
        work()
        events.record()
        best = min(best, events.pop_seconds()[1])
        if time.perf_counter() > end:
            return best


def _host_seconds(work: Callable[[], object], device: torch.device, runs: int = 200) -> float:
    """Return the host time of starting one operation."""
    work()
    _finish(device)
    start = time.perf_counter()
    for _ in range(runs):
        work()
    elapsed = time.perf_counter() - start
    _finish(device)
    return elapsed / runs


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
