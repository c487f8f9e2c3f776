"""Observations of good and faulty machines, as the doctor makes them."""

from __future__ import annotations

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
FAULTS = [
    ({"gpus": (), "cuda_error": OLD_DRIVER}, "GPUs", FindingStatus.FAILURE, "update the driver"),
    ({"gpus": (), "nvidia_devices": 0}, "GPUs", FindingStatus.WARNING, "--gpus all"),
    ({"peers": frozenset({(0, 1)})}, "P2P", FindingStatus.WARNING, "NCCL_P2P_DISABLE=1"),
    ({"nccl": ""}, "NCCL", FindingStatus.FAILURE, "install torch for CUDA"),
    ({"shared_memory": Space("/dev/shm", 64 << 20, 64 << 20)}, "shared memory", FindingStatus.WARNING, "--shm-size=1g"),
    ({"temporary": Space("/tmp", GIB, 4096)}, "temporary folder", FindingStatus.FAILURE, "set TMPDIR"),
    ({"memory_free": GIB}, "memory", FindingStatus.WARNING, "close other programs"),
    ({"open_files": 256}, "open files", FindingStatus.WARNING, "ulimit -n"),
    ({"versions": GOOD.versions | {"torch": "2.5.1+cu124"}}, "torch", FindingStatus.FAILURE, "Update ComfyUI's torch"),
    ({"versions": GOOD.versions | {"diffusers": "0.30.0"}}, "diffusers", FindingStatus.WARNING, "pip install -r"),
    ({"torchaudio_error": OTHER_CUDA}, "torchaudio", FindingStatus.WARNING, "ComfyUI 0.30 to 0.33 do not start"),
    ({"versions": {"torch": "2.11.0"}}, "diffusers", FindingStatus.WARNING, "pip install -r"),
    ({"versions": GOOD.versions | {"flash-attn": "1.0.9"}}, "flash-attn", FindingStatus.WARNING, "attention to sdpa"),
    ({"verdicts": (WRONG_MODEL,)}, "ComfyUI's WAN21_T2V", FindingStatus.WARNING, "use a tested ComfyUI"),
    ({"verdicts": (EQUAL, OTHER)}, "ComfyUI's guidance", FindingStatus.WARNING, "use a tested ComfyUI"),
    (
        {"measured": (DeviceMeasurements(PAIR, None, NO_P2P),)},
        "2 workers, cuda:0 to cuda:1",
        FindingStatus.FAILURE,
        "NCCL_P2P_DISABLE=1",
    ),
    (
        {"measured": (DeviceMeasurements(PAIR, None, NO_SPACE),)},
        "2 workers, cuda:0 to cuda:1",
        FindingStatus.FAILURE,
        "--shm-size=1g",
    ),
    (
        {"measured": (DeviceMeasurements(PAIR, None, WRONG_NCCL),)},
        "2 workers, cuda:0 to cuda:1",
        FindingStatus.FAILURE,
        "LD_LIBRARY_PATH",
    ),
    (
        {"measured": (DeviceMeasurements(PAIR, MEASURED, kernel_faults={"flash-attn": WRONG_WHEEL}),)},
        "flash-attn",
        FindingStatus.WARNING,
        "attention to sdpa",
    ),
    (
        {"measured": (DeviceMeasurements(PAIR, SLOW),)},
        "2 workers, cuda:0 to cuda:1",
        FindingStatus.WARNING,
        "choose preset slow links",
    ),
]
