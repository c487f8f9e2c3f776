"""Tensors in shared memory."""

from __future__ import annotations

import os

import pytest
import torch

from parallel_backend.wire.frames import mapped, share


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(3, 2, 5, 7), (0, 4), ()])
def test_a_shared_tensor_arrives_unchanged_and_leaves_no_open_file(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    before = open_files()
    tensor = torch.randn(shape).to(dtype)
    received = mapped(share(tensor), dtype, shape)
    assert torch.equal(received, tensor)
    del received
    assert open_files() == before


def test_a_tensor_may_be_larger_than_dev_shm_in_containers() -> None:
    tensor = torch.arange(20 << 20, dtype=torch.float32)  # 80 MB
    received = mapped(share(tensor), torch.float32, tensor.shape)
    assert received[-1] == tensor[-1]
    received += 1  # the receiver may write to its tensor, and the sender's stays
    assert tensor[0] == 0


def test_another_size_than_announced_is_refused() -> None:
    before = open_files()
    with pytest.raises(ValueError, match="40 bytes of shared memory were received instead of 44"):
        mapped(share(torch.zeros(10)), torch.float32, (11,))
    assert open_files() == before
