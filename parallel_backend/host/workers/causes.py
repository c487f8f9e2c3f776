"""Known causes of failures: the error texts that give them away, and the remedies for the user."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch

from ...errors import WorkerFailed


@dataclass(frozen=True)
class Cause:
    """A known cause of failures.

    Attributes:
        signs: a regular expression for the texts that give the cause away; case is ignored.
        remedy: advice to the user in plain words.
    """

    name: str
    signs: str
    remedy: str


CAUSES = (
    Cause(
        "locked memory",
        r"ibv_\w+ failed[^\n]*Cannot allocate memory",
        "InfiniBand is not allowed to lock enough memory: raise the limit with `ulimit -l unlimited` before starting the "
        "workers, in Docker with --ulimit memlock=-1, or set NCCL_IB_DISABLE=1, which makes the workers use ordinary "
        "network sockets.",
    ),
    Cause(
        "P2P",
        r"peer access is not supported|failed to open CUDA IPC handle|P2P.*(?:not supported|is disabled)"
        r"|doesn't support faster communication broadband via P2P|Data exchanged between ranks [^\n]* arrived corrupted",
        "These GPUs cannot reach each other's memory directly (P2P). Set the environment variable NCCL_P2P_DISABLE=1 before "
        "starting ComfyUI; the workers then exchange data through host memory.",
    ),
    Cause(
        "shared memory",
        r"(?:shared memory segment|/dev/shm/)[^\n]*(?:\(size|No space|bytes)|/dev/shm[^\n]*No space left"
        r"|posix_fallocate failed : No space left|unable to (?:open|mmap|write to) (?:file|shared memory)[^\n]*torch_",
        "The shared memory /dev/shm is full or too small: in Docker start the container with --shm-size=1g or more (64 MB is "
        "the default), elsewhere delete what other programs left in /dev/shm, or set NCCL_SHM_DISABLE=1.",
    ),
    Cause(
        "NCCL mismatched",
        r"undefined symbol: nccl|ncclCommRegister|libnccl[^\s]*: (?:version|undefined)|mismatched NCCL|NCCL version mismatch",
        "The NCCL library that is found is not the one this torch was built with: remove other NCCL libraries from "
        "LD_LIBRARY_PATH, and install torch again in ComfyUI's Python, which brings the right nvidia-nccl package.",
    ),
    Cause(
        "NCCL missing",
        r"libnccl\.so[^\n]*cannot open shared object|doesn't have NCCL built in|without NCCL|No module named .*nccl",
        "This torch has no NCCL, which GPUs need to exchange data: install torch for CUDA in ComfyUI's Python, or put "
        'two workers on one GPU (devices "0,0"), which do not need NCCL.',
    ),
    Cause(
        "cudaMallocAsync",
        r"cudaMallocAsync|CUDAMallocAsyncAllocator",
        "The memory allocator cudaMallocAsync cannot be used with NCCL: start ComfyUI with --disable-cuda-malloc.",
    ),
    Cause(
        "GPU memory",
        r"CUDA (?:driver )?error: out of memory|Cuda failure (?:\d+ )?'out of memory'|Failed to CUDA calloc"
        r"|(?:CUBLAS|CUDNN)_STATUS_\w*ALLOC(?:ATION)?_FAILED",
        "A GPU's memory is full: close other programs that use it (nvidia-smi lists them), or use weights sharded, an fp8 "
        "weight_dtype or a smaller picture.",
    ),
    Cause(
        "driver too old",
        r"NVIDIA driver on your system is too old|driver version is insufficient for CUDA runtime|forward compatibility was "
        r"attempted on non supported HW|requires? (?:a )?newer (?:NVIDIA )?driver",
        "The NVIDIA driver is older than this torch needs: update the driver, or install a torch built for an older CUDA.",
    ),
    Cause(
        "flash-attn",
        r"FlashAttention only supports|flash_attn_2_cuda|No module named 'flash_attn|flash_attn[^\n]*undefined symbol",
        "The flash-attn package does not fit this GPU or this torch: set the plan's attention to sdpa, or install a flash-attn "
        "built for them.",
    ),
    Cause(
        "GPU not supported by torch",
        r"no kernel image is available for execution|is not compatible with the current PyTorch installation",
        "This torch was not built for this GPU: install a torch whose CUDA version supports it, or leave the GPU out "
        "of devices.",
    ),
    Cause(
        "one GPU twice",
        r"Duplicate GPU detected",
        "Two workers share a GPU where NCCL expects one each: check whether CUDA_VISIBLE_DEVICES lists a GPU twice.",
    ),
    Cause(
        "GPU taken",
        r"CUDA-capable device\(s\) is/are busy or unavailable|all CUDA-capable devices are busy",
        "Another program uses this GPU exclusively: end it, or set the GPU's compute mode to Default "
        "(nvidia-smi -c 0).",
    ),
    Cause(
        "GPU failed",
        r"uncorrectable ECC error|fallen off the bus|GPU is lost|Xid",
        "The GPU itself reports a fault: reset it or restart the machine, and leave it out of devices if it comes back.",
    ),
    Cause(
        "no interface",
        r"no socket interface found|Unable to find (?:interface|address) for|unable to resolve hostname to a \(local\)",
        "The network interface that the workers talk over was not found: unset GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME, or "
        "set them to one that `ip address` lists.",
    ),
    Cause(
        "port",
        r"address already in use|EADDRINUSE",
        "Another program uses the port: choose another, or end that program.",
    ),
    Cause(
        "folder removed",
        r"No such file or directory[^\n]*comfyui-parallel-",
        "The workers' folder in the temporary folder was removed while they started: exclude comfyui-parallel-* from "
        "the program that cleans it, or set TMPDIR to another folder.",
    ),
    Cause(
        "disk full",
        r"No space left on device|Disk quota exceeded|File too large",
        "The disk with the temporary folder is full: free some space, or set TMPDIR to a folder on another disk.",
    ),
    Cause(
        "too many files",
        r"Too many open files",
        "The limit of open files is reached: raise it with `ulimit -n 65536` before starting ComfyUI.",
    ),
    Cause(
        "too many threads",
        r"can't start new thread|(?:Thread creation|pthread_create) failed[^\n]*: Resource temporarily unavailable"
        r"|RuntimeError: Resource temporarily unavailable|cannot allocate memory for thread-local data",
        "A limit keeps a worker from starting another thread: raise the limit of processes (`ulimit -u`, in Docker "
        "--pids-limit) or of address space (`ulimit -v`) before starting ComfyUI.",
    ),
    Cause(
        "host memory",
        r"Cannot allocate memory|DefaultCPUAllocator: can't allocate memory|MemoryError",
        "The machine's memory, not the GPU's, ran out: close other programs, use fewer workers, or weights sharded.",
    ),
    Cause(
        "permission",
        r"Permission denied|Operation not permitted",
        "ComfyUI's user has no permission for the file that the message names: grant it, or set TMPDIR to a folder of "
        "this user.",
    ),
)
"""Known causes in the order of the search: special causes before general ones."""

REMEDIES = {cause.name: cause.remedy for cause in CAUSES}
"""Name of a cause -> its remedy, for failures where something other than a text gives the cause away."""

LOST_PEER = re.compile(
    r"Connection (?:was )?(?:closed|reset) by (?:remote )?peer|Broken pipe|remote process exited or there was a network error"
    r"|Connection refused|peer .* (?:left|closed)|Socket closed|Application timeout caused pair closure",
    re.IGNORECASE,
)
"""Pattern of the errors that a rank reports when another rank went away. These are never the cause."""


def known_cause(text: str) -> Cause | None:
    """Return the first known cause whose signs are in an error text or log, or None."""
    return next((cause for cause in CAUSES if re.search(cause.signs, text, re.IGNORECASE)), None)


class WorkerOutOfMemory(WorkerFailed, torch.OutOfMemoryError):
    """A worker ran out of device memory. ComfyUI recognises torch.OutOfMemoryError and frees its models."""

    __module__ = "builtins"
