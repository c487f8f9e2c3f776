"""Requests to a child process that proves models, and its replies."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import msgspec

from ..small.case import chooses


class ProofRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One call of a small model to prove.

    Attributes:
        kind: the class in comfy.supported_models.
        case: the small model's name.
        model: the class of the loaded diffusion model, with its module; empty to accept any class.
        inputs: the inputs from the graph (see small/graph_inputs.py); None for the small model's own inputs.
        configuration: the part of the file's configuration that chooses code, as ComfyUI detected it; None for the class's own.
    """

    kind: str
    case: str
    model: str = ""
    configuration: dict[str, Any] | None = None
    inputs: dict[str, bool | str | None] | None = None


class ProofReply(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The result of one proof.

    Attributes:
        errors: relative L2 errors by the split's name; None for an error that is not finite. Empty if the proof failed to run.
        seconds: duration, without the imports.
        failure: the reason why the proof did not run.
        refused: True if the model's own blocks are the reason, so that workers would refuse the model too.
    """

    errors: dict[str, float | None]
    seconds: float
    failure: str = ""
    refused: bool = False

    @property
    def worst(self) -> tuple[str, float]:
        """Return the split with the largest error; an error that is not finite counts as infinite."""
        errors = {split: math.inf if error is None else error for split, error in self.errors.items()}
        return max(errors.items(), key=lambda item: item[1])


def off(error: float) -> str:
    """Return the error of a result in words."""
    return f"{error:.1e} off" if math.isfinite(error) else "not finite"


ASKED = msgspec.json.Decoder(list[ProofRequest])
ANSWER = msgspec.json.Decoder(ProofReply)


def class_name(kind: type) -> str:
    """Return the class's module and name, joined by a dot."""
    return f"{kind.__module__}.{kind.__qualname__}"


def chosen(configuration: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of a configuration that choose code."""
    return {name: value for name, value in configuration.items() if chooses(name, value)}
