"""The doctor's observations of the machine. Only this file reads the machine."""

from __future__ import annotations

import os
import re
import resource
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil
import torch

from ..derive import declaration_cache
from ..errors import Refused, RequestFailed, WorkerFailed
from ..gpus import Gpu, visible_gpus
from ..host import Backend, Deadlines
from ..host.workers.launcher import folder
from ..models.comfyui.content.known import TrialVerdict, verdict_cache
from ..plan import ParallelPlan
from ..plan.predict.measure import Machine
from ..plan.resolve import in_rows
from ..worker.memory.rank_memory import WINDOWS

CPU_PAIR = ("cpu", "cpu")


@dataclass(frozen=True)
class Space:
    """The size and the free bytes of the file system of a path."""

    path: str
    size: int
    free: int


@dataclass(frozen=True)
class DeviceMeasurements:
    """The measurement of some devices by workers.

    Attributes:
        devices: the devices, one for each worker.
        machine: the measured speeds; None if the workers failed.
        error: the error of the workers; empty if they did not fail.
        kernel_faults: the failures of attention kernels on these devices, by the name of their package.
    """

    devices: tuple[str, ...]
    machine: Machine | None
    error: str = ""
    kernel_faults: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Observations:
    """The observations of one machine.

    Attributes:
        gpus: the GPUs that torch can use.
        nvidia_devices: the number of GPUs that the driver shows.
        cuda_error: the reason why torch cannot use them.
        cuda_version: the CUDA version of torch; empty without CUDA.
        peers: the pairs of GPUs that reach each other's memory.
        nccl: the version of NCCL; empty without NCCL.
        memory: bytes of host memory.
        memory_free: bytes of available host memory.
        shared_memory: the file system of /dev/shm.
        temporary: the file system of the workers' temporary folder.
        open_files: the limit of open files; negative for no limit.
        versions: the versions of installed packages.
        torchaudio_error: the reason why torchaudio cannot be imported; empty without an error.
        allocator: ComfyUI's setting of torch's CUDA allocator.
        measured: the workers' measurements.
        verdicts: the verdicts on functions of ComfyUI's that no tested version has.
        derived: the derived declarations of classes that nobody declared.
        under_windows: this is WSL2.
    """

    gpus: tuple[Gpu, ...]
    nvidia_devices: int
    cuda_error: str
    cuda_version: str
    peers: frozenset[tuple[int, int]]
    nccl: str
    memory: int
    memory_free: int
    shared_memory: Space
    temporary: Space
    open_files: int
    versions: dict[str, str]
    torchaudio_error: str
    allocator: str
    measured: tuple[DeviceMeasurements, ...]
    verdicts: tuple[TrialVerdict, ...] = ()
    derived: tuple[declaration_cache.DeclarationRecord, ...] = ()
    under_windows: bool = False


def look(report: Callable[[str], None] = lambda what: None) -> Observations:
    """Observe this machine. Workers are started for that and ended again.

    Args:
        report: called with the name of each part before it begins.
    """
    report("GPUs, memory and packages")
    gpus, error = _gpus()
    memory = psutil.virtual_memory()
    return Observations(
        gpus=gpus,
        nvidia_devices=gpus_of_the_driver(),
        cuda_error=error,
        cuda_version=torch.version.cuda or "",
        peers=peers(len(gpus)),
        nccl=_nccl(),
        memory=memory.total,
        memory_free=memory.available,
        shared_memory=_space("/dev/shm"),
        temporary=_space(folder()),
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        versions=_versions("torch", "torchaudio", "diffusers", "flash-attn"),
        torchaudio_error=_torchaudio_error(),
        allocator=os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or "",
        measured=_measure(len(gpus), report),
        verdicts=verdict_cache().all(),
        derived=declaration_cache.all_records(),
        under_windows=WINDOWS.exists(),
    )


def _gpus() -> tuple[tuple[Gpu, ...], str]:
    if torch.version.cuda is None:
        return (), "this torch was built without CUDA"
    try:
        return visible_gpus(), ""
    except (RuntimeError, AssertionError) as error:
        return (), str(error).splitlines()[0]


def gpus_of_the_driver(root: Path = Path("/")) -> int:
    """Return the number of GPUs that NVIDIA's driver shows.

    Under WSL2 one device file represents all GPUs, next to Windows' driver library; they count as one GPU.
    """
    windows = (root / "dev/dxg").exists() and (root / "usr/lib/wsl/lib/libcuda.so.1").exists()
    return len(list((root / "dev").glob("nvidia[0-9]*"))) or int(windows)


def peers(gpus: int) -> frozenset[tuple[int, int]]:
    """Return the pairs of GPUs, among the first `gpus`, that reach each other's memory."""
    pairs = ((a, b) for a in range(gpus) for b in range(gpus) if a != b)
    return frozenset(pair for pair in pairs if torch.cuda.can_device_access_peer(*pair))


def _nccl() -> str:
    if not torch.distributed.is_nccl_available():
        return ""
    return ".".join(str(part) for part in torch.cuda.nccl.version())


def _space(path: str) -> Space:
    try:
        usage = shutil.disk_usage(path)
    except OSError:
        return Space(path, 0, 0)
    return Space(path, usage.total, usage.free)


def _versions(*packages: str) -> dict[str, str]:
    versions = {}
    for package in packages:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            pass
    return versions


def _torchaudio_error() -> str:
    """Return the first sentence of torchaudio's import error; empty if there is none.

    The text is also empty if torchaudio is not installed, because ComfyUI reports that itself.
    """
    try:
        import_module("torchaudio")
    except ModuleNotFoundError:
        return ""
    except (ImportError, OSError, RuntimeError) as error:
        return re.split(r"\.?\s*\n|\.\s|\.$", str(error), maxsplit=1)[0]
    return ""


def _measure(gpus: int, report: Callable[[str], None]) -> tuple[DeviceMeasurements, ...]:
    """Measure two workers on the CPU, which use gloo, and one worker on each GPU, which use NCCL."""
    backend = Backend(Deadlines(silence=30, stall=60))
    try:
        groups = [CPU_PAIR, *([tuple(f"cuda:{index}" for index in range(gpus))] if gpus else [])]
        measurements = []
        for devices in groups:
            report(f"{len(devices)} workers on {', '.join(dict.fromkeys(devices))}: starting and measuring them")
            measurements.append(measured(backend, devices))
        return tuple(measurements)
    finally:
        backend.close()


def measured(backend: Backend, devices: Sequence[str]) -> DeviceMeasurements:
    """Measure devices by a backend's workers, one worker on each device."""
    plan = in_rows(ParallelPlan(), tuple(devices))
    try:
        machine = backend.measure(plan, lambda: False)
        return DeviceMeasurements(tuple(devices), machine, kernel_faults=backend.kernel_faults(plan.devices))
    except (RequestFailed, WorkerFailed, Refused) as error:
        return DeviceMeasurements(tuple(devices), None, str(error))
