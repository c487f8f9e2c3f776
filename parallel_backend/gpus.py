"""The GPUs of this machine, read without a CUDA context, which would take 0.3 to 0.5 GB of each GPU in ComfyUI's process."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

import torch

MEBIBYTE = 1 << 20
SECONDS = 10
"""Seconds to wait for the driver's tool. It takes one or two on machines with many GPUs that nothing uses."""

_GPU_FIELDS = ("uuid", "memory.free", "display_active", "utilization.gpu", "temperature.gpu")
QUERY = ("nvidia-smi", f"--query-gpu={','.join(_GPU_FIELDS)}", "--format=csv,noheader,nounits")


@dataclass(frozen=True)
class Gpu:
    """A GPU that torch sees: memory in bytes, load in percent, temperature in degrees Celsius.

    `free`, `load` and `temperature` are None if the driver does not report them. `uuid` is the driver's name of the GPU.
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
    """The driver's report about a GPU: free bytes, True if it drives a display, load in percent, degrees Celsius."""

    free: int | None
    display: bool
    load: int | None = None
    temperature: int | None = None


def visible_gpus() -> tuple[Gpu, ...]:
    """Return the GPUs in torch's order. Raise the same errors as `torch.cuda.init`.

    torch numbers the GPUs that CUDA_VISIBLE_DEVICES leaves, in an order of CUDA's; the driver numbers all GPUs. So they are
    matched by their UUIDs. Parts of a GPU (MIG) have UUIDs of their own, which the driver's tool does not report here.
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
    """Return this machine's choices for a plan's devices, each with a description of its devices, the usual choice first."""
    try:
        gpus = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    except RuntimeError:  # for example the driver is too old; the workers report that
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
    """Return the reports of the driver's own tool by UUID; empty if the tool is missing or takes too long."""
    try:
        ran = subprocess.run(query, capture_output=True, text=True, timeout=SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return {}
    return parse(ran.stdout)


def parse(text: str) -> dict[str, DriverReport]:
    """Parse the tool's answer to QUERY. A field may be unknown, such as `[N/A]`, and a line may be an error message."""
    reports = {}
    for line in text.splitlines():
        fields = [part.strip() for part in line.split(",")]
        if len(fields) != len(_GPU_FIELDS):  # for example an error message about a GPU that is lost
            continue
        uuid, free, display, load, temperature = fields
        bytes_free = int(free) * MEBIBYTE if free.isdecimal() else None
        reports[uuid] = DriverReport(bytes_free, display == "Enabled", _number(load), _number(temperature))
    return reports


_PROCESS_FIELDS = ("gpu_uuid", "pid", "process_name", "used_memory")
HOLDERS = ("nvidia-smi", f"--query-compute-apps={','.join(_PROCESS_FIELDS)}", "--format=csv,noheader,nounits")


@dataclass(frozen=True)
class GpuProcess:
    """A process that computes on a GPU, with the bytes that it holds there; None if the driver does not report them."""

    uuid: str
    process: int
    name: str
    used_bytes: int | None


def ask_holders(query: Sequence[str] = HOLDERS) -> tuple[GpuProcess, ...]:
    """Return the processes that the driver's own tool shows on the GPUs; empty if the tool is missing or takes too long.

    In a container, and under WSL2, the tool shows no processes, or processes without the bytes that they hold.
    """
    try:
        ran = subprocess.run(query, capture_output=True, text=True, timeout=SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return ()
    processes = []
    for line in ran.stdout.splitlines():
        fields = [part.strip() for part in line.split(",")]
        if len(fields) >= len(_PROCESS_FIELDS) and fields[1].isdecimal():
            uuid, process, *name, amount = fields
            number = _number(amount)
            processes.append(
                GpuProcess(uuid, int(process), ",".join(name), None if number is None else number * MEBIBYTE)
            )
    return tuple(processes)


def _number(text: str) -> int | None:
    return int(text) if text.isdecimal() else None
