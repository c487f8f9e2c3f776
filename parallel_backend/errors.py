"""The errors a user can meet. Each message is one sentence that says what to do."""

from __future__ import annotations

import torch


class Refused(ValueError):
    """What was asked for cannot work; said before any work starts, with the numbers and a way out."""


class Cancelled(Exception):
    """The request was cancelled by the user; the workers are alive and idle."""


class NotFinite(ArithmeticError):
    """The model's output holds NaN or infinity; the workers are alive and idle."""


class WorkerFailed(RuntimeError):
    """A worker died, hung or raised; the whole group was stopped and starts again when next needed."""


class WorkerOutOfMemory(WorkerFailed, torch.OutOfMemoryError):
    """A worker ran out of device memory. ComfyUI recognises torch.OutOfMemoryError and frees its models."""
