"""Device and link speed of this machine, measured by its workers once, in about two seconds, and kept in a cache folder."""

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
from .known_machines import PCIE_OVERLAP, software
from .profiles import WAVE, Device, Level, Profile

BUDGET = 0.2
"""Seconds spent on one measurement, at most (one run may take longer)."""

MODEL_OPERATION = 6
"""Host time of an operation inside diffusers' modules, in bare operations (19 µs against 3 µs on one CPU core)."""

FASTER_THAN_PCIE = 6e10
"""Bytes/s that only NVLink reaches."""

KERNEL_BYTES = 0.3e9
"""Device memory that a worker which is up takes later, besides the model: kernels, loaded when they are first used, the
workspaces of cuBLAS and cuDNN, and what the allocator cannot use for its cuts."""

HEAD_DIM = 128
"""Features of a head of nearly every model."""

FLOAT = 4
"""Bytes of the elements sent."""


class Machine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What was found: FLOP/s, bytes/s, seconds of host time an operation of a model. What is free is not of these: it is
    asked for each time.

    Each is that of the slowest of `ranks` workers, all measured at once. `link_bandwidth` is bytes/s out of one rank in
    an all-to-all of all ranks, `link_latency` the seconds of an empty one. `connection` is bytes that a communicator takes
    of a GPU for each other rank of it (NCCL: from some 25 MB over PCIe to 0.4 GB over NVLink). `host_bandwidth` is bytes/s from
    pinned host memory. `kinds` are the names of the ranks' devices: those of one name are taken to be equally fast.
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
    """Seconds of one block of each kind on each rank, `[rank][kind]`, and how many blocks of each kind a model has.

    `together` says of a model that runs whole that it computes the rows of a batch together.
    """

    seconds: tuple[tuple[float, ...], ...]
    counts: tuple[int, ...]
    together: bool = False


Measurement = TypeVar("Measurement", Machine, BlockTimes)


class MeasuredRanks(Protocol):
    """The part of a Communicator that is measured."""

    @property
    def size(self) -> int:
        """How many ranks there are."""

    def all_to_all(self, send: Tensor, send_sizes: Sequence[int], receive_sizes: Sequence[int]) -> Tensor:
        """Send the k-th piece of a flat tensor to rank k; the pieces received, in rank order."""

    def all_gather(self, local: Tensor, sizes: Sequence[int]) -> Tensor:
        """Every rank's `[1, n, 1]`, joined along dim 1."""


def measure(
    device: torch.device,
    ranks: MeasuredRanks,
    connection: float,
    kinds: Sequence[str],
    attend: Callable[[Tensor, Tensor, Tensor], object],
) -> Machine:
    """Measure this machine. A collective: all ranks call it, and all get the same.

    Args:
        attend: the attention kernel that models run on here; it takes q, k and v, `[batch, tokens, heads, HEAD_DIM]` in bf16
            on GPUs and in fp32 on CPUs.
        connection: bytes that each connection of this rank's communicators took.
        kinds: the names of the ranks' devices.
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
    """What was measured before under this key, or `find()`, which is then kept. An unreadable file is replaced."""
    before = kept(key, kind, folder)
    if before is not None:
        return before
    measured = find()
    _store(kind, folder).write(_key(key, kind), measured)
    return measured


def kept(key: str, kind: type[Measurement], folder: Path | None = None) -> Measurement | None:
    """What was measured before under this key; None if nothing was, or what is there cannot be read."""
    return _store(kind, folder).read(_key(key, kind))


def forget_all(folder: Path | None = None) -> None:
    """Forget all that was measured, so that it is measured anew when it is needed."""
    _store(Machine, folder).forget()
    _store(BlockTimes, folder).forget()


def _store(kind: type[Measurement], folder: Path | None) -> DiskCache[Measurement]:
    return DiskCache(kind.__name__.lower(), kind, folder)


def _key(key: str, kind: type[Measurement]) -> str:
    return f"{kind.__name__}\n{key}"


def machine_key(devices: Sequence[str], attention: str) -> str:
    """What a measurement depends on: the devices and their models in rank order, torch, CUDA, the heads measured, and the
    choice of attention kernel."""
    names = [device_kind(name) for name in devices]
    heads = f"heads of {HEAD_DIM} by {attention}"
    return "\n".join([*devices, *names, torch.__version__, str(torch.version.cuda), heads])


def device_kind(device: str) -> str:
    """The name of a GPU's model, or the machine's for a CPU, or for a device of another machine."""
    return torch.cuda.get_device_name(device) if device.startswith("cuda") else platform.node()


def measured_profile(
    machine: Machine,
    memory: tuple[float, ...],
    gpus: bool,
    paces: tuple[float, ...] = (),
    compiler: str = "",
) -> Profile:
    """The measured machine as a profile; how well transfers hide behind compute is taken from machines with such links.

    Args:
        memory: bytes that a job may take of each rank's device now.
        gpus: whether the workers are on GPUs.
        paces: as the profile's.
        compiler: what blocks are compiled with; empty for nothing.
    """
    overlap = 1.0 if machine.link_bandwidth > FASTER_THAN_PCIE else PCIE_OVERLAP
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
        ),
        levels=(Level(machine.ranks, machine.link_bandwidth, machine.link_latency),),
        overlap=overlap,
        software=software(compiler),
        paces=paces,
        free=memory,
        compiled=software(COMPILER) if gpus and not compiler else None,
    )


def _of_all(value: float, device: torch.device, ranks: MeasuredRanks) -> list[float]:
    """Return every rank's value."""
    local = torch.tensor([[[value]]], dtype=torch.float64, device=device)
    return [float(entry) for entry in ranks.all_gather(local, [1] * ranks.size).flatten()]


def link_speed(device: torch.device, link: MeasuredRanks) -> tuple[float, float]:
    """Return bytes/s out of one rank and the seconds of a one-element all-to-all. Every rank runs the same number of
    times.
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
    """The shortest of several runs."""
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
