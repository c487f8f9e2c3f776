"""The errors a user can meet. Each message is one sentence that says what to do. No torch: plans are predicted without it.

ComfyUI shows an error's type in front of the sentence, with its module unless that is `builtins`; so these have that one.
"""

from __future__ import annotations


class Refused(ValueError):
    """What was asked for cannot work; said before any work starts, with the numbers and a way out."""

    __module__ = "builtins"


class PlanRefused(Refused):
    """It is the plan that cannot work. The sentence names its fields that are to be changed, each with its value behind it."""

    __module__ = "builtins"


class Cancelled(Exception):
    """The request was cancelled by the user; the workers are alive and idle."""


class NotFinite(ArithmeticError):
    """NaN or infinity in a model's output or a sampler's latent; the workers are alive and idle.

    Args:
        finding: the tensor and its number of wrong values.
        cause: the rest of the sentence, with its punctuation: the likely cause.
    """

    __module__ = "builtins"

    def __init__(self, finding: str, cause: str) -> None:
        super().__init__(finding + cause)
        self.finding = finding


class RequestFailed(RuntimeError):
    """One request's data raised the same error on all workers; they are alive and idle."""

    __module__ = "builtins"


class WorkerFailed(RuntimeError):
    """A worker died, hung or raised; the whole group was stopped and starts again when next needed."""

    __module__ = "builtins"
