"""Wan Animate 2's cache of its pose branch. ComfyUI's node puts a cache into the options; the workers create their own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ....parallel_backend.conditioning import OPTIONS, POSE_CACHE, flatten
from ....parallel_backend.diffusion import Value
from ....parallel_backend.models.comfyui.content.model_code import options_read_by
from ....parallel_backend.models.comfyui.features.pose_cache import CLASS, MODULE, OPTION
from ..own_code import foreign
from .feature import Feature, FeatureCall

HOLDS = frozenset({"store_device", "dtype", "slots", "slot", "_pending", "_staging"})
"""The attributes of ComfyUI's cache: its device and dtype, and its contents."""


def known(transformer_options: Mapping[str, Any]) -> bool:
    """Return True if the option holds ComfyUI's own cache, with exactly the attributes in `HOLDS`."""
    cache = transformer_options.get(OPTION)
    kind = type(cache)
    if (kind.__module__, kind.__qualname__) != (MODULE, CLASS):
        return False
    return vars(cache).keys() == HOLDS and not any(foreign(cache, "pose cache"))


def _values(call: FeatureCall) -> dict[str, Value]:
    """Return the node's settings, as values to send with a call; empty for a model that does not read the option."""
    values: dict[str, Value] = {}
    if known(call.options) and OPTION in options_read_by(call.proxy.skeleton):
        cache = call.options[OPTION]
        settings = {"on_device": cache.store_device.type != "cpu", "dtype": cache.dtype}
        flatten(f"{OPTIONS}.{POSE_CACHE}", settings, {}, values)
    return values


FEATURE = Feature(handled=lambda call: {OPTION} if known(call.options) else (), values=_values)
