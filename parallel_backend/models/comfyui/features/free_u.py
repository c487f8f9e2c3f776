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
    return function_made(settings["function"], scale_dict)


def function_made(name: str, scales: Mapping[int, tuple[float, float]]) -> Any:
    """The function of a node, by its qualified name; `scales` by numbers of channels."""
    return function_of(MODULE, name, {"scale_dict": scales, "on_cpu_devices": {}})
