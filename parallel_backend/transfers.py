"""Copies between the host and a device that do not block the host."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

NOT_PINNED = (
    "host memory could not be pinned, so copies to the GPU are slower: raise ulimit -l, unless this is WSL2, which has its "
    "own limit"
)


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor to a device. Copies to a GPU go through pinned memory, because otherwise the host would wait for them."""
    if tensor.device.type == "cpu" and device.type == "cuda":
        return empty_pinned(tensor.shape, tensor.dtype).copy_(tensor).to(device, non_blocking=True)
    return tensor.to(device)


def empty_pinned(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Allocate an uninitialised tensor in pinned host memory, which GPUs copy at full speed.

    If pinning fails, warn and return ordinary memory.
    """
    try:
        return torch.empty(tuple(shape), dtype=dtype, pin_memory=True)
    except RuntimeError as error:
        warnings.warn(f"{NOT_PINNED} ({error})", RuntimeWarning, stacklevel=2)
        clear_cuda_error()
        return torch.empty(tuple(shape), dtype=dtype)


def clear_cuda_error() -> None:
    """Clear CUDA's last error. Otherwise the next kernel launch fails with the error of an earlier call."""
    with contextlib.suppress(RuntimeError):
        torch.ones(1, device="cuda").neg_()
