"""Observations of good and faulty machines, as the doctor makes them."""

from __future__ import annotations

from typing import Any

import msgspec

from parallel_backend.derive.declaration_cache import DeclarationRecord
from parallel_backend.derive.request import DeriveReply
from parallel_backend.doctor import FindingStatus, Observations
from parallel_backend.doctor.observations import DeviceMeasurements, Space
from parallel_backend.gpus import Gpu
from parallel_backend.models.comfyui.content.known import TrialVerdict
from tests.derive.found import FOUND, kind
from tests.support.plans import MEASURED

GIB = 1 << 30
PAIR = ("cuda:0", "cuda:1")
GOOD = Observations(
    gpus=(Gpu("NVIDIA H100", 80 * GIB, 79 * GIB, (9, 0), 132, False),) * 2,
    nvidia_devices=2,
    cuda_error="",
    cuda_version="13.0",
    peers=frozenset({(0, 1), (1, 0)}),
    nccl="2.28.9",
    memory=128 * GIB,
    memory_free=100 * GIB,
    shared_memory=Space("/dev/shm", 64 * GIB, 64 * GIB),
    temporary=Space("/tmp", 64 * GIB, 64 * GIB),
    open_files=65536,
    versions={"torch": "2.11.0+cu130", "torchaudio": "2.11.0+cu130", "diffusers": "0.42.1", "flash-attn": "2.8.3"},
    torchaudio_error="",
    allocator="",
    measured=(DeviceMeasurements(("cpu", "cpu"), MEASURED), DeviceMeasurements(PAIR, MEASURED)),
)
OLD_DRIVER = "The NVIDIA driver on your system is too old (found version 11040)."
OTHER_CUDA = "Detected that PyTorch and TorchAudio were compiled with different CUDA versions"
NO_P2P = (
    "Worker 0 of 2 (cuda:0) failed: RuntimeError: CUDA error: peer access is not supported between these two devices"
)
NO_SPACE = "Worker 1 of 2 (cuda:1) failed\nNCCL WARN Error while creating shared memory segment /dev/shm/nccl-KW (size 5967872)"
WRONG_NCCL = "Worker 0 ended with exit code 1\nlibtorch_cuda.so: undefined symbol: ncclCommRegister"
WRONG_WHEEL = (
    "flash-attn does not work on cuda:0 (ImportError: flash_attn_2_cuda: undefined symbol: _ZN3c104cuda9SetDeviceEi)"
)
SLOW = msgspec.structs.replace(MEASURED, link_bandwidth=1e9)
DERIVED = DeclarationRecord(
    "NewModel",
    "0.46.0",
    (
        DeriveReply(40.0, FOUND, (kind(), kind(flag=True)), "ulysses 2 1.0e-07, ring 3 2.0e-07"),
        DeriveReply(9.0, kinds=(kind(mode="edit"),), failure="its blocks take turns", lasting=True),
    ),
)
EQUAL = TrialVerdict("guidance", ("comfy.samplers.cfg_function",), "0.46.0")
OTHER = msgspec.structs.replace(EQUAL, mismatch="whose result differs from the workers' in a trial run")
WRONG_MODEL = TrialVerdict(
    "WAN21_T2V", ("WAN21_T2V (wan, text)",), "0.46.0", "which is 2.3e-02 off under ring 3, where 1e-05 is allowed"
)
FAILURE, WARNING = FindingStatus.FAILURE, FindingStatus.WARNING
TWO_WORKERS = "2 workers, cuda:0 to cuda:1"


def on_pair(*measured: Any, **faults: Any) -> dict[str, Any]:
    """Return the observation of two GPUs with these measurements."""
    return {"measured": (DeviceMeasurements(PAIR, *measured, **faults),)}


FAULTS = [
    ({"gpus": (), "cuda_error": OLD_DRIVER}, "GPUs", FAILURE, "update the driver"),
    ({"gpus": (), "nvidia_devices": 0}, "GPUs", WARNING, "--gpus all"),
    ({"peers": frozenset({(0, 1)})}, "P2P", WARNING, "NCCL_P2P_DISABLE=1"),
    ({"nccl": ""}, "NCCL", FAILURE, "install torch for CUDA"),
    ({"shared_memory": Space("/dev/shm", 64 << 20, 64 << 20)}, "shared memory", WARNING, "--shm-size=1g"),
    ({"temporary": Space("/tmp", GIB, 4096)}, "temporary folder", FAILURE, "set TMPDIR"),
    ({"memory_free": GIB}, "memory", WARNING, "close other programs"),
    ({"open_files": 256}, "open files", WARNING, "ulimit -n"),
    ({"versions": GOOD.versions | {"torch": "2.5.1+cu124"}}, "torch", FAILURE, "Update ComfyUI's torch"),
    ({"versions": GOOD.versions | {"diffusers": "0.30.0"}}, "diffusers", WARNING, "pip install -r"),
    ({"torchaudio_error": OTHER_CUDA}, "torchaudio", WARNING, "ComfyUI 0.30 to 0.33 do not start"),
    ({"versions": {"torch": "2.11.0"}}, "diffusers", WARNING, "pip install -r"),
    ({"versions": GOOD.versions | {"flash-attn": "1.0.9"}}, "flash-attn", WARNING, "attention to sdpa"),
    ({"verdicts": (WRONG_MODEL,)}, "ComfyUI's WAN21_T2V", WARNING, "use a tested ComfyUI"),
    ({"verdicts": (EQUAL, OTHER)}, "ComfyUI's guidance", WARNING, "use a tested ComfyUI"),
    (on_pair(None, NO_P2P), TWO_WORKERS, FAILURE, "NCCL_P2P_DISABLE=1"),
    (on_pair(None, NO_SPACE), TWO_WORKERS, FAILURE, "--shm-size=1g"),
    (on_pair(None, WRONG_NCCL), TWO_WORKERS, FAILURE, "LD_LIBRARY_PATH"),
    (on_pair(MEASURED, kernel_faults={"flash-attn": WRONG_WHEEL}), "flash-attn", WARNING, "attention to sdpa"),
    (on_pair(SLOW), TWO_WORKERS, WARNING, "choose preset slow links"),
]
