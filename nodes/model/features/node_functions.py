"""Functions of ComfyUI's own nodes on a MODEL: after classifier-free guidance, after attention and in UNets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from comfy.ldm.modules.diffusionmodules.openaimodel import UNetModel
from torch import nn

from ....parallel_backend.conditioning import ATTENTION_GUIDANCE, OPTIONS, SIDES, UNET_FUNCTIONS, flatten
from ....parallel_backend.diffusion import FunctionRecipe, Value
from ....parallel_backend.errors import Refused
from ....parallel_backend.models.comfyui.features.node_functions import ATTENTION_OUTPUT, UNET_OUTPUT
from ....parallel_backend.models.comfyui.features.recipe import encoded
from ..refusals import WAY_OUT
from .places import GUIDANCE, mismatch_at, recipes_at


def guidance_functions(model_options: Mapping[str, Any]) -> list[FunctionRecipe] | None:
    """Return the functions that change the guidance, in ComfyUI's order; None if any function is unknown."""
    return recipes_at(GUIDANCE, model_options.get(GUIDANCE, ()))


def attention_guidance_functions(transformer_options: Mapping[str, Any]) -> list[FunctionRecipe]:
    """Return the attention guidance functions in order. Return an empty list if any function is unknown."""
    return recipes_at(ATTENTION_OUTPUT, _patches(transformer_options, ATTENTION_OUTPUT)) or []


def unet_functions(transformer_options: Mapping[str, Any], model: nn.Module) -> list[FunctionRecipe]:
    """Return the functions between a UNet's output blocks in order. Return an empty list if any function is unknown.

    Args:
        model: ComfyUI's diffusion model.
    """
    if not isinstance(model, UNetModel):
        return []
    return recipes_at(UNET_OUTPUT, _patches(transformer_options, UNET_OUTPUT), channels_of(model)) or []


def channels_of(model: nn.Module) -> list[int]:
    """Return the widths of a UNet's blocks; none for other models."""
    return (
        sorted({model.model_channels * factor for factor in model.channel_mult}) if isinstance(model, UNetModel) else []
    )


def attention_values_of(transformer_options: Mapping[str, Any]) -> dict[str, Value]:
    """Return the attention guidance functions, and the branches of the call, as values that go with the call."""
    values: dict[str, Value] = {}
    if recipes := attention_guidance_functions(transformer_options):
        values[f"{OPTIONS}.{ATTENTION_GUIDANCE}"] = encoded(recipes)
        flatten(f"{OPTIONS}.{SIDES}", transformer_options.get(SIDES), {}, values)
    return values


def unet_values_of(transformer_options: Mapping[str, Any], model: nn.Module) -> dict[str, Value]:
    """Return the functions between a UNet's output blocks as values that go with a call."""
    recipes = unet_functions(transformer_options, model)
    return {f"{OPTIONS}.{UNET_FUNCTIONS}": encoded(recipes)} if recipes else {}


def refuse_differing(transformer_options: Mapping[str, Any], model: nn.Module) -> None:
    """Raise Refused for a function that goes into the model and that workers could rebuild, but not run as it is."""
    widths = channels_of(model)
    for place in (ATTENTION_OUTPUT, UNET_OUTPUT) if widths else (ATTENTION_OUTPUT,):
        for function in _patches(transformer_options, place):
            if (what := mismatch_at(place, function, widths)) is not None:
                raise Refused(f"What a node does by {what}, cannot be done with a parallel MODEL: {WAY_OUT}.")


def _patches(transformer_options: Mapping[str, Any], place: str) -> Sequence[Any]:
    return (transformer_options.get("patches") or {}).get(place, ())
