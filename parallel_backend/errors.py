"""The errors that a user can meet. Each message is one sentence that says what to do.

ComfyUI shows an error's type before the sentence, with its module unless that is `builtins`. So these classes set `builtins`.
This file does not import torch, because plans are predicted without it.
"""

from __future__ import annotations


class Refused(ValueError):
    """The error for a request that cannot work. It is raised before any work starts, with the numbers and a way out."""

    __module__ = "builtins"


class PlanRefused(Refused):
    """The error for a plan that cannot work. The sentence names the plan's fields to change, each followed by its value."""

    __module__ = "builtins"


class Cancelled(Exception):
    """The error for a request that the user cancelled; the workers are alive and idle."""


class NotFinite(ArithmeticError):
    """The error for NaN or infinity in a model's output or a sampler's latent; the workers are alive and idle.

    Args:
        finding: the tensor and its number of wrong values.
        cause: the rest of the sentence, with its punctuation: the likely cause.
    """

    __module__ = "builtins"

    def __init__(self, finding: str, cause: str) -> None:
        super().__init__(finding + cause)
        self.finding = finding


class RequestFailed(RuntimeError):
    """The error for a request whose data raised the same error on all workers; the workers are alive and idle."""

    __module__ = "builtins"


class WorkerFailed(RuntimeError):
    """The error for a worker that died, hung or raised. The whole group was stopped and starts again when next needed."""

    __module__ = "builtins"
