"""FreeU in a worker: ComfyUI's own function, made of the numbers that its node was given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .guidance import function_of

MODULE = "nodes_freelunch"


def free_u_patches(settings: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """The patches of a UNet's output blocks; `settings` is what the host says of each."""
    return {"output_block_patch": [_function(each) for each in settings]}


def _function(settings: Mapping[str, Any]) -> Any:
    scales = settings["scales"]
    pairs = zip(scales[::2], scales[1::2], strict=True)
    scale_dict = dict(zip(settings["channels"], pairs, strict=True))
    return function_of(MODULE, settings["function"], {"scale_dict": scale_dict, "on_cpu_devices": {}})
