"""Wan Animate 2's cache of its pose branch, as ComfyUI's node puts it among the options: the workers make their own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from ....parallel_backend.conditioning import OPTIONS, POSE_CACHE, flatten
from ....parallel_backend.diffusion import Value
from ....parallel_backend.models.comfyui.content.model_code import options_read_by
from ....parallel_backend.models.comfyui.features.pose_cache import CLASS, MODULE, OPTION
from ..own_code import foreign

HOLDS = frozenset({"store_device", "dtype", "slots", "slot", "_pending", "_staging"})
"""What such a cache consists of: where it keeps what, in which type, and what it has kept."""


def known(transformer_options: Mapping[str, Any]) -> bool:
    """Whether the option is there and ComfyUI's own cache, as it is known here."""
    cache = transformer_options.get(OPTION)
    kind = type(cache)
    if (kind.__module__, kind.__qualname__) != (MODULE, CLASS):
        return False
    return vars(cache).keys() == HOLDS and not any(foreign(cache, "pose cache"))


def without_it(transformer_options: Mapping[str, Any]) -> Mapping[str, Any]:
    """The options less the cache, where it is known: any other is refused by its name."""
    if not known(transformer_options):
        return transformer_options
    return {name: value for name, value in transformer_options.items() if name != OPTION}


def values_of(transformer_options: Mapping[str, Any], model: nn.Module) -> dict[str, Value]:
    """What its node was given, as values that go with a call; nothing for a model that does not look for it."""
    values: dict[str, Value] = {}
    if known(transformer_options) and OPTION in options_read_by(model):
        cache = transformer_options[OPTION]
        settings = {"on_device": cache.store_device.type != "cpu", "dtype": cache.dtype}
        flatten(f"{OPTIONS}.{POSE_CACHE}", settings, {}, values)
    return values
