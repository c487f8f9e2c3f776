"""Messages name known causes: real error texts, from public issue threads, get the remedy that helps."""

from __future__ import annotations

import re
import signal
from types import SimpleNamespace
from typing import Any

import pytest

from parallel_backend.host.workers import diagnosis
from parallel_backend.host.workers.causes import CAUSES, LOST_PEER, known_cause
from parallel_backend.host.workers.channel import Channel, Heard
from parallel_backend.wire.to_host import FailedReply, HeartbeatReply

TEXTS: dict[str, tuple[str, ...]] = {
    "locked memory": (
        "torch.distributed.DistBackendError: NCCL error: ncclSystemError: System call (e.g. socket, malloc) or external library "
        "call failed or device error.\nLast error:\nCall to ibv_reg_mr failed with error Cannot allocate memory",
        "misc/ibvwrap.cc:158 NCCL WARN Call to ibv_create_cq failed with error Cannot allocate memory",
    ),
    "P2P": (
        "RuntimeError: CUDA error: peer access is not supported between these two devices",
        "transport/p2p.cc:238 NCCL WARN failed to open CUDA IPC handle : 217 peer access is not supported between these two",
        "NotImplementedError: Using RTX 4000 series doesn't support faster communication broadband via P2P or IB. Please set "
        '`NCCL_P2P_DISABLE="1"` and `NCCL_IB_DISABLE="1"`',
        "RuntimeError: Data exchanged between ranks [0, 1] arrived corrupted on rank 1.",
    ),
    "shared memory": (
        "include/shm.h:28 NCCL WARN Call to posix_fallocate failed : No space left on device\n"
        "include/shm.h:48 NCCL WARN Error while creating shared memory segment nccl-shm-recv-146-1-2-3 (size 9637888)",
        "misc/shmutils.cc:88 NCCL WARN Error: failed to extend /dev/shm/nccl-WU88OE to 9637892 bytes, error: No space left on "
        "device (28)",
        "misc/shmutils.cc:112 NCCL WARN Error while creating shared memory segment /dev/shm/nccl-KWfVyt (size 5967872)",
    ),
    "NCCL mismatched": (
        "ImportError: /lib/python3.9/site-packages/torch/lib/libtorch_cuda.so: undefined symbol: ncclCommRegister",
    ),
    "NCCL missing": (
        "ImportError: libnccl.so.2: cannot open shared object file: No such file or directory",
        "RuntimeError: Distributed package doesn't have NCCL built in",
    ),
    "cudaMallocAsync": (
        "terminate called after throwing an instance of 'c10::AcceleratorError'\n  what(): CUDA error: an illegal memory access "
        "was encountered\nException raised from free_impl at /pytorch/c10/cuda/CUDAMallocAsyncAllocator.cpp:206",
        "RuntimeError: cudaMallocAsync does not yet support checkPoolLiveAllocations. If you need it, please file an issue",
    ),
    "GPU memory": (
        "torch.AcceleratorError: CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported",
        "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "include/alloc.h:178 NCCL WARN Cuda failure 'out of memory'\n"
        "include/alloc.h:185 NCCL WARN Failed to CUDA calloc 6291456 bytes",
    ),
    "driver too old": (
        "RuntimeError: The NVIDIA driver on your system is too old (found version 11040). Please update your GPU driver by "
        "downloading and installing a new version",
        "RuntimeError: CUDA error: CUDA driver version is insufficient for CUDA runtime version",
    ),
    "flash-attn": (
        "RuntimeError: FlashAttention only supports Ampere GPUs or newer.",
        "ImportError: flash_attn_2_cuda.cpython-311-x86_64-linux-gnu.so: undefined symbol: _ZN3c104cuda9SetDeviceEi",
        "ModuleNotFoundError: No module named 'flash_attn'",
    ),
    "GPU not supported by torch": ("CUDA error: no kernel image is available for execution on the device",),
    "one GPU twice": (
        "ncclInvalidUsage: This usually reflects invalid usage of NCCL library.\nLast error:\n"
        "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 10",
    ),
    "GPU taken": ("RuntimeError: CUDA error: CUDA-capable device(s) is/are busy or unavailable",),
    "GPU failed": ("RuntimeError: CUDA error: uncorrectable ECC error encountered",),
    "no interface": ("bootstrap.cc:45 NCCL WARN Bootstrap : no socket interface found",),
    "port": ("The server socket has failed to bind to [::]:29500 (errno: 98 - Address already in use).",),
    "folder removed": ("[Errno 2] No such file or directory: '/tmp/comfyui-parallel-4qx3/socket'",),
    "disk full": ("torch.distributed.DistStoreError: No space left on device",),
    "too many files": ("OSError: [Errno 24] Too many open files",),
    "too many threads": (
        "    backend_class = ProcessGroupGloo(\n                    ^^^^^^^^^^^^^^^^^\n"
        "RuntimeError: Resource temporarily unavailable",
        "RuntimeError: can't start new thread",
        "libgomp: Thread creation failed: Resource temporarily unavailable",
        "OpenBLAS blas_thread_init: pthread_create failed for thread 2 of 64: Resource temporarily unavailable",
    ),
    "host memory": ("RuntimeError: [enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory",),
    "permission": ("PermissionError: [Errno 13] Permission denied: '/models/flux.safetensors'",),
}
"""Error texts by the name of their cause."""


@pytest.mark.parametrize(("name", "text"), [(name, text) for name, texts in TEXTS.items() for text in texts])
def test_a_real_error_text_has_its_known_cause(name, text):
    cause = known_cause(f"Traceback (most recent call last):\n  ...\n{text}\n")
    assert cause is not None
    assert cause.name == name


def test_every_cause_has_an_error_text():
    assert {cause.name for cause in CAUSES} == {*TEXTS}


@pytest.mark.parametrize(
    "text",
    [
        "RuntimeError: a fault was injected",
        "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:544] Connection closed by peer [127.0.0.1]:41234",
        "KeyError: 'double_blocks.0.img_attn.qkv.weight'",
    ],
)
def test_other_error_texts_have_no_known_cause(text):
    assert known_cause(text) is None


@pytest.mark.parametrize(
    "text",
    [
        "[../third_party/gloo/gloo/transport/tcp/pair.cc:544] Connection closed by peer [127.0.0.1]:41234",
        "[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection reset by peer",
        "NCCL error: remote process exited or there was a network error",
        "[Errno 32] Broken pipe",
    ],
)
def test_lost_connections_are_recognised(text):
    assert LOST_PEER.search(text)


class Group:
    """A failed group: exit codes, reports and log tails by rank."""

    def __init__(self, codes: dict[int, int], reports: dict[int, str], logs: dict[int, str], workers: int = 3) -> None:
        self.processes = [SimpleNamespace(returncode=codes.get(rank)) for rank in range(workers)]
        self._logs = logs
        self.devices = tuple(f"cuda:{rank}" for rank in range(workers))
        self.channel = Channel(1)
        self.channel.heard = {rank: Heard(HeartbeatReply("sampling", 4, 9, False), 0, 0) for rank in range(workers)}
        self.reports = [
            FailedReply(rank, f"cuda:{rank}", "sampling", 4, None, reason, "Traceback ...", at)
            for at, (rank, reason) in enumerate(reports.items())
        ]

    def log_tail(self, rank: int, lines: int = 12) -> str:
        return self._logs.get(rank, "")

    def message(self) -> str:
        launched: Any = self
        return str(diagnosis.explain(launched, self.devices, self.channel, self.reports))


LOST = "RuntimeError: Connection closed by peer [127.0.0.1]:1"


FIRST_CAUSES: dict[str, tuple[Group, str]] = {
    "a signal before reports of other ranks": (
        Group({1: -signal.SIGSEGV, 2: -signal.SIGABRT}, {0: LOST}, {1: "Fatal Python error: Segmentation fault"}),
        r"Worker 1 of 3 \(cuda:1\) was killed by SIGSEGV while sampling, step 4\.(?s:.*)Fatal Python error",
    ),
    "an exit without a report before lost connections": (
        Group({2: 0}, {0: LOST, 1: LOST}, {}),
        r"Worker 2 of 3 \(cuda:2\) ended with exit code 0",
    ),
    "an exception before aborts of ranks that lost the peer": (
        Group({0: -signal.SIGABRT}, {2: LOST, 1: "ValueError: this one"}, {}),
        r"Worker 1 of 3 \(cuda:1\) failed while sampling, step 4: ValueError: this one\.",
    ),
    "an abort before lost connections": (
        Group({0: -signal.SIGABRT}, {2: LOST}, {0: "CUDAMallocAsyncAllocator.cpp:206"}),
        r"Worker 0 of 3 \(cuda:0\) was killed by SIGABRT while sampling, step 4\. The memory",
    ),
}


@pytest.mark.parametrize(("group", "message"), FIRST_CAUSES.values(), ids=FIRST_CAUSES)
def test_the_message_names_the_rank_that_failed_first(group, message):
    assert re.match(message, group.message())


def test_a_report_gets_the_remedy_for_the_cause_in_its_log():
    log = "NCCL WARN Error while creating shared memory segment /dev/shm/nccl-KWfVyt (size 5967872)"
    message = Group({}, {1: "DistBackendError: NCCL error, unhandled system error"}, {1: log}).message()
    assert "start the container with --shm-size=1g" in message
    assert message.endswith(log)


@pytest.mark.parametrize(
    ("device", "phase", "remedy"),
    [
        ("cuda", "connecting the workers", "Set the environment variable NCCL_P2P_DISABLE=1 before starting ComfyUI"),
        ("cuda", "sampling", ""),
        ("cpu", "connecting the workers", ""),
    ],
)
def test_a_hang_of_gpus_in_their_first_exchange_is_blamed_on_p2p(device, phase, remedy):
    """All workers wait in a synchronisation with their GPU, so that no worker is known to wait for another."""
    devices = [f"{device}:{rank}" for rank in range(2)]
    heard = {rank: Heard(HeartbeatReply(phase, 0, 5, False), 0, 0) for rank in range(2)}
    message = str(diagnosis.stalled(devices, heard, 300))
    start = f"No worker made progress for 300 s; the slowest is worker 0 of 2 ({device}:0) while {phase}. "
    assert message.startswith(start)
    assert ("NCCL_P2P_DISABLE" in message) == bool(remedy)
    assert remedy in message and message.endswith(diagnosis.AFTERWARDS)
