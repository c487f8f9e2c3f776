"""Moving tensors between the host and a device without waiting for it."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

NOT_PINNED = (
    "host memory could not be pinned (is it limited, as under WSL2, or by ulimit -l?): copies from it are slower"
)


def sent_to(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on a device; nobody waits, as a copy from memory that is not pinned would."""
    if tensor.device.type == "cpu" and device.type == "cuda":
        return pinned(tensor.shape, tensor.dtype).copy_(tensor).to(device, non_blocking=True)
    return tensor.to(device)


def pinned(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Host memory that GPUs copy from and to at full speed, filled with nothing; ordinary memory where there is no more of it."""
    try:
        return torch.empty(tuple(shape), dtype=dtype, pin_memory=True)
    except RuntimeError as error:
        warnings.warn(f"{NOT_PINNED} ({error})", RuntimeWarning, stacklevel=2)
        forget_failure()
        return torch.empty(tuple(shape), dtype=dtype)


def forget_failure() -> None:
    """Take CUDA's last error, which a call that failed has left for the next kernel launch to fail with."""
    with contextlib.suppress(RuntimeError):
        torch.ones(1, device="cuda").neg_()
