"""Model families: all that ComfyUI knows, two over diffusers' modules, and a registry."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from .cogvideox import CogVideoXFamily
from .comfyui.comfy_family import ComfyFamily
from .family import Family
from .pixart import PixArtFamily

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {"cogvideox": CogVideoXFamily(), "pixart": PixArtFamily(), "comfyui": ComfyFamily()}
)
"""Every family the backend runs, by name."""
