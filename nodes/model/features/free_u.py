"""ComfyUI's FreeU on a UNet that runs whole: its numbers go to the workers, which make the node's own function of them."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from comfy.ldm.modules.diffusionmodules.openaimodel import UNetModel
from torch import nn

from ....parallel_backend.conditioning import FREE_U, OPTIONS, flatten
from ....parallel_backend.diffusion import Value
from .guidance import module_of

PLACE = "output_block_patch"
"""Where such nodes put their functions among `patches`."""

KNOWN = MappingProxyType(
    {"nodes_freelunch": tuple(f"{node}.execute.<locals>.output_block_patch" for node in ("FreeU", "FreeU_V2"))}
)
"""By module: functions that treat each row of a batch for itself."""


def free_u(transformer_options: Mapping[str, Any], model: nn.Module) -> list[dict[str, Any]]:
    """Return the name and scales of each FreeU function, in order. Return an empty list if any function is unknown.

    Args:
        model: ComfyUI's diffusion model.
    """
    functions = (transformer_options.get("patches") or {}).get(PLACE, ())
    if not isinstance(model, UNetModel):
        return []
    settings = [_settings(function) for function in functions]
    return [] if None in settings else [entry for entry in settings if entry is not None]


def values_of(transformer_options: Mapping[str, Any], model: nn.Module) -> dict[str, Value]:
    """They as values that go with a call."""
    values: dict[str, Value] = {}
    if settings := free_u(transformer_options, model):
        flatten(f"{OPTIONS}.{FREE_U}", settings, {}, values)
    return values


def _settings(function: Any) -> dict[str, Any] | None:
    if module_of(function, KNOWN) is None:
        return None
    scales = inspect.getclosurevars(function).nonlocals["scale_dict"]
    numbers = [float(number) for pair in scales.values() for number in pair]
    return {"function": function.__qualname__, "channels": list(scales), "scales": numbers}
