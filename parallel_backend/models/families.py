"""The registry of model families: all models of ComfyUI, and two models of diffusers."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from ..diffusion import ModelSpec
from .comfyui.comfy_family import ComfyFamily
from .diffusers.cogvideox import CogVideoXFamily
from .diffusers.pixart import PixArtFamily
from .family import Family

UNSHARDED = "unsharded"
"""The name of the family of ComfyUI's models that run unsharded although their class has a declaration."""

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "cogvideox": CogVideoXFamily(),
        "pixart": PixArtFamily(),
        "comfyui": ComfyFamily(),
        UNSHARDED: ComfyFamily(lambda kind: None),
    }
)
"""The families that the backend runs, by name."""


def family_of(spec: ModelSpec) -> Family:
    """Return the family that runs a model."""
    return FAMILIES[spec.family] if spec.derived is None else ComfyFamily(lambda kind: spec.derived)
