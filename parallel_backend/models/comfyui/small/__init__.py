"""Small models of ComfyUI's own classes, each with one call, for tests and for proofs on a user's machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from .case import Builder, Case, Example, Small
from .graph_inputs import GraphInputs, case_with_inputs
from .often_used import OFTEN_USED
from .pictures import PICTURES
from .sound import SOUND
from .videos import VIDEOS
from .wan import WAN

__all__ = [
    "OFTEN_USED",
    "PICTURES",
    "SMALL",
    "SOUND",
    "VIDEOS",
    "WAN",
    "Builder",
    "Case",
    "Example",
    "small",
    "small_model",
    "small_with_inputs",
]

SMALL: Mapping[str, Small] = MappingProxyType({**OFTEN_USED, **PICTURES, **VIDEOS, **WAN, **SOUND})


def small(name: str, builder: Builder = Builder(), kind: str = "") -> Case:  # noqa: B008 (frozen)
    """Return a small model, with one call of it as ComfyUI's class makes the call.

    Args:
        kind: the class around the model, by its name in comfy.supported_models; by default the example's own class.
    """
    return SMALL[name](builder).case(kind, builder.chosen)


def small_with_inputs(names: Sequence[str], builder: Builder, kind: str, graph_inputs: GraphInputs) -> Case:
    """Return one of several small models of a class, called with the inputs of a graph.

    Raises:
        Refused: the small models do not have all these inputs.
    """
    return case_with_inputs([SMALL[name](builder) for name in names], kind, builder.chosen, graph_inputs)


def small_model(name: str, builder: Builder = Builder()) -> Any:  # noqa: B008 (frozen)
    """Return only the diffusion model, which may be on the meta device."""
    return SMALL[name](builder).model
