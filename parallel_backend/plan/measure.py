"""Device and link speed of this machine, measured once in under two seconds and kept in the user's cache folder."""

from __future__ import annotations

import hashlib
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import msgspec
import torch
from torch import Tensor
from torch.nn import functional as F

from .profiles import EAGER, Device, Level, Profile

BUDGET = 0.2
"""Seconds spent on one measurement, at most (one run may take longer)."""

MODEL_OPERATION = 6
"""Host time of an operation inside diffusers' modules, in bare operations (19 µs against 3 µs on one CPU core)."""

FLOAT = 4
"""Bytes of the elements sent."""


class Measured(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What was found: FLOP/s, bytes/s, seconds of host time an operation of a model, bytes of memory.

    `link_bandwidth` is bytes/s out of one rank in an all-to-all of `ranks`, `link_latency` the seconds of an empty one.
    With one rank both are 0.
    """

    matmul: float
    attention: float
    bandwidth: float
    launch: float
    memory: float
    ranks: int = 1
    link_bandwidth: float = 0.0
    link_latency: float = 0.0


class AllToAll(Protocol):
    """The part of a Communicator that is measured."""

    @property
    def size(self) -> int:
        """Ranks."""

    def all_to_all(self, send: Tensor, send_sizes: Sequence[int], receive_sizes: Sequence[int]) -> Tensor:
        """Send the k-th piece of a flat tensor to rank k; the pieces received, in rank order."""


def measure(device: torch.device, link: AllToAll | None = None) -> Measured:
    """Measure this device and, with a link, its all-to-all (a collective: all its ranks call this)."""
    gpu = device.type == "cuda"
    side, tokens, dtype = (4096, 4096, torch.bfloat16) if gpu else (256, 256, torch.float32)
    matrix = torch.randn(side, side, device=device, dtype=dtype)
    heads = torch.randn(1, 8, tokens, 64, device=device, dtype=dtype)
    large = torch.zeros(1 << (26 if gpu else 22), device=device)
    small = torch.zeros(1, device=device)
    with torch.inference_mode():
        bandwidth, latency = (0.0, 0.0) if link is None or link.size == 1 else _link(device, link)
        return Measured(
            matmul=2 * side**3 / _seconds(lambda: matrix @ matrix, device),
            attention=4
            * heads.shape[1]
            * tokens**2
            * 64
            / _seconds(lambda: F.scaled_dot_product_attention(heads, heads, heads), device),
            bandwidth=2 * large.nbytes / _seconds(lambda: large.add_(1), device),
            launch=MODEL_OPERATION * _host_seconds(lambda: small.add_(1), device),
            memory=float(torch.cuda.get_device_properties(device).total_memory if gpu else _host_memory()),
            ranks=1 if link is None else link.size,
            link_bandwidth=bandwidth,
            link_latency=latency,
        )


def cached(key: str, find: Callable[[], Measured], folder: Path | None = None) -> Measured:
    """What was measured before under this key, or `find()`, which is then kept. An unreadable file is replaced."""
    folder = cache_folder() if folder is None else folder
    path = folder / f"machine-{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"
    try:
        return msgspec.json.decode(path.read_bytes(), type=Measured)
    except (OSError, msgspec.MsgspecError):
        measured = find()
    try:
        _write(path, msgspec.json.encode(measured))
    except OSError:  # a read-only home: measure again next time
        pass
    return measured


def machine_key(devices: Sequence[str], driver: str) -> str:
    """What a measurement depends on: the devices' names in rank order, and the versions of torch and the driver."""
    return "\n".join([*devices, torch.__version__, driver])


def cache_folder() -> Path:
    """Where measurements are kept: in $XDG_CACHE_HOME, or ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "comfyui-parallel"


def measured_profile(measured: Measured, base: Profile) -> Profile:
    """The measured machine as a profile; what was not measured (overlap, software) is taken from `base`."""
    device = Device(measured.matmul, measured.attention, measured.bandwidth, measured.memory, measured.launch)
    levels = base.levels
    if measured.ranks > 1:
        levels = (Level(measured.ranks, measured.link_bandwidth, measured.link_latency),)
    return replace(base, name="this machine", device=device, levels=levels, software=EAGER)


def _link(device: torch.device, link: AllToAll) -> tuple[float, float]:
    """Bytes/s out of one rank, and seconds of an all-to-all of one element; every rank runs the same number of times."""

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
    taken = max(seconds(elements, 5) - latency, 1e-9)
    return FLOAT * elements * (link.size - 1) / taken, latency


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    """The shortest of several runs."""
    work()
    _finish(device)
    best, end = float("inf"), time.perf_counter() + BUDGET
    while True:
        start = time.perf_counter()
        work()
        _finish(device)
        now = time.perf_counter()
        best = min(best, now - start)
        if now > end:
            return best


def _host_seconds(work: Callable[[], object], device: torch.device, runs: int = 200) -> float:
    """Host time of starting one operation."""
    work()
    _finish(device)
    start = time.perf_counter()
    for _ in range(runs):
        work()
    taken = time.perf_counter() - start
    _finish(device)
    return taken / runs


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _host_memory() -> int:
    """Bytes of physical memory; without sysconf (Windows) the largest integer, which limits nothing."""
    if hasattr(os, "sysconf"):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return sys.maxsize


def _write(path: Path, data: bytes) -> None:
    """Whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}")
    partial.write_bytes(data)
    os.replace(partial, path)
