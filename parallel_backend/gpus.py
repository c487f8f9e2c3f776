"""What GPUs this machine shows, without opening one: a context would take 0.3 to 0.5 GB of each in ComfyUI's process."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

import torch

MEBIBYTE = 1 << 20
SECONDS = 10
"""The driver's tool takes one or two on machines with many GPUs that nothing uses."""

_ASKED = ("uuid", "memory.free", "display_active", "utilization.gpu", "temperature.gpu")
QUERY = ("nvidia-smi", f"--query-gpu={','.join(_ASKED)}", "--format=csv,noheader,nounits")


@dataclass(frozen=True)
class Gpu:
    """A GPU that torch sees; memory in bytes, load in percent, temperature in degrees Celsius.

    `free`, `load` and `temperature` are None where the driver does not say. `uuid` is what the driver calls it.
    """

    name: str
    memory: int
    free: int | None
    capability: tuple[int, int]
    multiprocessors: int
    display: bool
    load: int | None = None
    temperature: int | None = None
    uuid: str = ""


@dataclass(frozen=True)
class DriverReport:
    """What the driver tells of a GPU: bytes that are free, whether a display shows what it draws, percent, degrees Celsius."""

    free: int | None
    display: bool
    load: int | None = None
    temperature: int | None = None


def visible_gpus() -> tuple[Gpu, ...]:
    """The GPUs in torch's order; raises as torch.cuda.init does.

    torch numbers those that CUDA_VISIBLE_DEVICES leaves, in an order of CUDA's; the driver numbers all. So they are matched by
    their UUIDs. Parts of a GPU (MIG) have UUIDs of their own, which the driver does not tell here.
    """
    torch.cuda.init()
    reports = ask_driver()
    gpus = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        uuid = f"GPU-{properties.uuid}"
        mine = reports.get(uuid, DriverReport(None, False))
        capability = properties.major, properties.minor
        gpus.append(
            Gpu(
                properties.name,
                properties.total_memory,
                mine.free,
                capability,
                properties.multi_processor_count,
                mine.display,
                mine.load,
                mine.temperature,
                uuid,
            )
        )
    return tuple(gpus)


def device_choices() -> tuple[tuple[str, str], ...]:
    """What this machine offers for a plan's devices: each choice and what it comes to, the usual one first."""
    try:
        gpus = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    except RuntimeError:  # such as a driver that is too old, which the workers name
        gpus = []
    if not gpus:
        return (
            ("auto", "one worker on the CPU"),
            ("cpu:2", "two workers on the CPU"),
            ("cpu:4", "four workers on the CPU"),
        )
    runs = [(f"0-{count - 1}", f"{count} GPUs") for count in (2, 4, 8) if count < len(gpus)]
    several = [("auto", "the GPUs that are faster together"), *runs, ("all", f"all {len(gpus)} GPUs")]
    single = [(str(index), f"{gpu.name}, {gpu.total_memory / 1e9:.0f} GB") for index, gpu in enumerate(gpus)]
    return (*(several if len(gpus) > 1 else [("auto", "the GPU of this machine")]), *single)


def ask_driver(query: Sequence[str] = QUERY) -> dict[str, DriverReport]:
    """What the driver's own tool says, by UUID; nothing where there is no such tool."""
    try:
        ran = subprocess.run(query, capture_output=True, text=True, timeout=SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return {}
    return parse(ran.stdout)


def parse(text: str) -> dict[str, DriverReport]:
    """The answer to QUERY; a field may say that it is not known, such as `[N/A]`, and a line that something is wrong."""
    reports = {}
    for line in text.splitlines():
        fields = [part.strip() for part in line.split(",")]
        if len(fields) != len(_ASKED):  # such as of a GPU that is lost
            continue
        uuid, free, display, load, temperature = fields
        bytes_free = int(free) * MEBIBYTE if free.isdecimal() else None
        reports[uuid] = DriverReport(bytes_free, display == "Enabled", _number(load), _number(temperature))
    return reports


_HELD = ("gpu_uuid", "pid", "process_name", "used_memory")
HOLDERS = ("nvidia-smi", f"--query-compute-apps={','.join(_HELD)}", "--format=csv,noheader,nounits")


@dataclass(frozen=True)
class GpuProcess:
    """A process that computes on a GPU, with the bytes that it holds there, None where the driver does not say."""

    uuid: str
    process: int
    name: str
    used_bytes: int | None


def ask_holders(query: Sequence[str] = HOLDERS) -> tuple[GpuProcess, ...]:
    """The processes that the driver's own tool shows on the GPUs; none where there is no such tool.

    In a container, and under WSL2, it shows none, or not what they hold.
    """
    try:
        ran = subprocess.run(query, capture_output=True, text=True, timeout=SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return ()
    processes = []
    for line in ran.stdout.splitlines():
        fields = [part.strip() for part in line.split(",")]
        if len(fields) >= len(_HELD) and fields[1].isdecimal():
            uuid, process, *name, amount = fields
            number = _number(amount)
            processes.append(
                GpuProcess(uuid, int(process), ",".join(name), None if number is None else number * MEBIBYTE)
            )
    return tuple(processes)


def _number(text: str) -> int | None:
    return int(text) if text.isdecimal() else None
