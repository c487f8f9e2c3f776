"""ComfyUI's normalized attention guidance, which changes what attentions give: the workers do it behind theirs."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from ....parallel_backend.conditioning import ATTENTION_GUIDANCE, OPTIONS, SIDES, flatten
from ....parallel_backend.diffusion import GuidanceFunction, Value
from .guidance import known_function

PLACE = "attn1_output_patch"
"""Where such nodes put their functions among `patches`."""

KNOWN = MappingProxyType({"nodes_nag": ("NAGuidance.execute.<locals>.nag_attention_output_patch",)})
"""By module: functions that treat each token for itself, and compare the sides of a call."""


def attention_guidance_functions(transformer_options: Mapping[str, Any]) -> list[GuidanceFunction]:
    """Return the attention guidance functions in order. Return an empty list if any function is unknown."""
    patches = transformer_options.get("patches") or {}
    functions = [known_function(function, KNOWN) for function in patches.get(PLACE, ())]
    return [] if None in functions else [function for function in functions if function is not None]


def values_of(transformer_options: Mapping[str, Any]) -> dict[str, Value]:
    """They, and the sides that are in the call, as values that go with it."""
    values: dict[str, Value] = {}
    if functions := attention_guidance_functions(transformer_options):
        settings = [
            {"module": function.module, "function": function.function, "values": function.values}
            for function in functions
        ]
        flatten(f"{OPTIONS}.{ATTENTION_GUIDANCE}", settings, {}, values)
        flatten(f"{OPTIONS}.{SIDES}", transformer_options.get(SIDES), {}, values)
    return values


def name_of(function: GuidanceFunction) -> str:
    """The name of the node that made the function."""
    return function.function.partition(".")[0]
