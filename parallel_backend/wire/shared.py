"""Tensors in shared memory (memfd), whose descriptor goes to another process over the Unix socket.

Containers often have 64 MB of /dev/shm. A memfd does not count there, and the kernel frees it when no process has it open.
"""

from __future__ import annotations

import mmap
import os

import torch
from torch import Tensor


def share(tensor: Tensor) -> int:
    """Copy a tensor into shared memory and return the descriptor, which the caller closes.

    Raises:
        OSError: there is no memory left.
    """
    flat = tensor.detach().to("cpu").contiguous().view(-1).view(torch.uint8)
    descriptor = os.memfd_create("parallel", os.MFD_CLOEXEC)
    try:
        view, offset = memoryview(flat.numpy().data), 0
        while offset < len(view):
            offset += os.write(descriptor, view[offset:])
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def mapped(descriptor: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """Return the tensor in shared memory without a copy, and close the descriptor.

    Raises:
        ValueError: the memory has another size than the tensor.
    """
    try:
        size = torch.Size(shape).numel() * dtype.itemsize
        if os.fstat(descriptor).st_size != size:
            raise ValueError(
                f"{os.fstat(descriptor).st_size} bytes of shared memory were handed over instead of {size}"
            )
        if not size:
            return torch.empty(shape, dtype=dtype)
        memory = mmap.mmap(descriptor, size)
        return torch.frombuffer(memory, dtype=dtype).view(shape)
    finally:
        os.close(descriptor)
