"""Every form of an out-of-memory error is recognised, as CUDA, its libraries, NCCL and torch report it."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from parallel_backend.wire.to_host import MemoryShortage
from parallel_backend.worker.__main__ import _shortage
from parallel_backend.worker.memory import rank_memory
from parallel_backend.worker.memory.rank_memory import (
    OutOfMemory,
    RankMemory,
    failed_allocation_bytes,
    is_out_of_memory,
)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 54.00 MiB. GPU 0 has a total capacity of 23.65 GiB"
        ),
        OutOfMemory(10, 5),
        RuntimeError(
            "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported at some other API call"
        ),
        RuntimeError("CUDA driver error: out of memory"),
        RuntimeError("Triton Error [CUDA]: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
        RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
        dist.DistBackendError(
            "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:77, unhandled cuda error (run with "
            "NCCL_DEBUG=INFO for details), NCCL version 2.26.2\nncclUnhandledCudaError: Call to CUDA function failed.\n"
            "Last error:\nCuda failure 2 'out of memory'"
        ),
        RuntimeError(
            "[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate "
            "4000000000000 bytes. Error code 12 (Cannot allocate memory)"
        ),
        RuntimeError("unable to mmap 335544320 bytes from file </torch_1_2>: Cannot allocate memory (12)"),
        RuntimeError("std::bad_alloc"),
        MemoryError(),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
    ],
    ids=lambda error: f"{type(error).__name__}: {error}"[:60],
)
def test_memory_that_ran_out_is_recognised(error):
    assert is_out_of_memory(error)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"),
        RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"),
        dist.DistBackendError(
            "ncclUnhandledCudaError: Call to CUDA function failed.\nCuda failure 1 'invalid argument'"
        ),
        dist.DistBackendError("NCCL error: Last error:\nCall to ibv_reg_mr failed with error Cannot allocate memory"),
        OSError(errno.ENOSPC, "No space left on device"),
        ValueError("out of memory is what a file is called"),
    ],
    ids=str,
)
def test_other_failures_are_not_out_of_memory(error):
    assert not is_out_of_memory(error)


def test_the_bytes_of_a_real_failed_allocation_are_known():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)
    assert failed_allocation_bytes(caught.value) == 1 << 60


@pytest.mark.parametrize(("free", "returned"), [(5 << 30, False), (3 << 30, True)])
def test_torchs_cached_memory_is_returned_if_it_is_much_of_the_free_memory(
    monkeypatch: pytest.MonkeyPatch, free: int, returned: bool
) -> None:
    """The numbers are those of a GPU with 8 GB in use and 1 GB cached."""
    emptied: list[bool] = []
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 9 << 30)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 8 << 30)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free, 80 << 30))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(True))
    RankMemory(torch.device("cuda", 0), 1).trim()
    assert bool(emptied) is returned


class DeadGpu:
    """A rank whose device no longer answers."""

    def shortage(self, error: BaseException) -> MemoryShortage:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")


def test_a_shortage_is_reported_for_a_gpu_that_no_longer_answers() -> None:
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 54.00 MiB.")
    dead: Any = DeadGpu()
    assert _shortage(error, dead) == MemoryShortage(54 << 20, free_bytes=0, model_bytes=0, models_on_device=[])


@pytest.mark.parametrize(("windows", "kept"), [(True, 2_000_000_000), (False, 0)])
def test_memory_that_windows_keeps_does_not_count_as_free(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, windows: bool, kept: int
) -> None:
    (tmp_path / "dxg").touch()
    monkeypatch.setattr(rank_memory, "WINDOWS", tmp_path / ("dxg" if windows else "none"))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 3 << 30)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 2 << 30)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (20 << 30, 24 << 30))
    assert RankMemory(torch.device("cuda", 0), 1).free_on_device() == (21 << 30) - kept
