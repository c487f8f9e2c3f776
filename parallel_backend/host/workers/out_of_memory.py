"""The error of a worker that ran out of memory, which ComfyUI knows as one of torch's."""

from __future__ import annotations

import torch

from ...errors import WorkerFailed


class WorkerOutOfMemory(WorkerFailed, torch.OutOfMemoryError):
    """A worker ran out of device memory. ComfyUI recognises torch.OutOfMemoryError and frees its models."""

    __module__ = "builtins"
