"""What a child that proves models is asked, and what it answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from ..small.case import chooses


class Asked(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One call of a small model to prove.

    Attributes:
        kind: the class in comfy.supported_models.
        case: the small model's name.
        model: the class of the diffusion model that was loaded, with its module; empty for whatever the small one is of.
        configuration: the part of the file's, as ComfyUI detected it, that chooses code; None for what its class says of itself.
    """

    kind: str
    case: str
    model: str = ""
    configuration: dict[str, Any] | None = None


class Answer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What became of it.

    Attributes:
        errors: relative L2 by the split's name; empty where it was not made.
        seconds: that it took, without the imports.
        failure: why it was not made.
        refused: whether the model's own blocks are the reason, which workers would refuse too.
    """

    errors: dict[str, float]
    seconds: float
    failure: str = ""
    refused: bool = False

    @property
    def worst(self) -> tuple[str, float]:
        """The split with the largest error, or one that gives no number."""
        return max(self.errors.items(), key=lambda each: float("inf") if each[1] != each[1] else each[1])


ASKED = msgspec.json.Decoder(list[Asked])
ANSWER = msgspec.json.Decoder(Answer)


def class_name(kind: type) -> str:
    """A class's name with its module's."""
    return f"{kind.__module__}.{kind.__qualname__}"


def chosen(configuration: Mapping[str, Any]) -> dict[str, Any]:
    """Of a configuration what chooses code."""
    return {name: value for name, value in configuration.items() if chooses(name, value)}
