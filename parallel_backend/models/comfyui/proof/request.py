"""Questions to a child that proves models, and its answers."""

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
        model: the class of the diffusion model that was loaded, with its module; empty for whatever the small one is of.
        inputs: the inputs that the graph gives (see small/graph_inputs.py); None for the small model's own.
        configuration: the part of the file's, as ComfyUI detected it, that chooses code; None for what its class says of itself.
    """

    kind: str
    case: str
    model: str = ""
    configuration: dict[str, Any] | None = None
    inputs: dict[str, bool | str | None] | None = None


class ProofReply(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The result of one proof.

    Attributes:
        errors: relative L2 by the split's name, null in JSON for one that is not finite; empty where it was not made.
        seconds: that it took, without the imports.
        failure: why it was not made.
        refused: whether the model's own blocks are the reason, which workers would refuse too.
    """

    errors: dict[str, float | None]
    seconds: float
    failure: str = ""
    refused: bool = False

    @property
    def worst(self) -> tuple[str, float]:
        """The split with the largest error, which is infinite where it is not finite."""
        errors = {split: math.inf if error is None else error for split, error in self.errors.items()}
        return max(errors.items(), key=lambda item: item[1])


def off(error: float) -> str:
    """Say how far a result is off."""
    return f"{error:.1e} off" if math.isfinite(error) else "not finite"


ASKED = msgspec.json.Decoder(list[ProofRequest])
ANSWER = msgspec.json.Decoder(ProofReply)


def class_name(kind: type) -> str:
    """Return a class's name behind its module's."""
    return f"{kind.__module__}.{kind.__qualname__}"


def chosen(configuration: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of a configuration that choose code."""
    return {name: value for name, value in configuration.items() if chooses(name, value)}
