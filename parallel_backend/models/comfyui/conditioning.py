"""Conditioning as flat names: what travels between ComfyUI and the workers, and the arguments of the model it becomes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ...diffusion import Value
from ...errors import Refused

MAX_DEPTH = 4
LENGTH = "#"
"""Ends the name under which the length of a list stands."""


def flatten(name: str, given: Any, tensors: dict[str, Tensor], values: dict[str, Value], depth: int = 0) -> None:
    """Put a tree of tensors, numbers, words, lists and dicts under names such as `ref_latents.0`.

    Raises:
        Refused: it holds something else, or is too deep.
    """
    if depth > MAX_DEPTH:
        raise Refused(
            f"{name} in the conditioning is nested too deeply to be sent to the workers: remove the node that adds it."
        )
    match given:
        case Tensor():
            tensors[name] = given
        case None | bool() | int() | float() | str():
            values[name] = given
        case list() | tuple():
            values[f"{name}.{LENGTH}"] = len(given)
            for index, item in enumerate(given):
                flatten(f"{name}.{index}", item, tensors, values, depth + 1)
        case dict() if given and all(
            isinstance(key, str) and key and not key.isdigit() and "." not in key for key in given
        ):
            for key, item in given.items():
                flatten(f"{name}.{key}", item, tensors, values, depth + 1)
        case _:
            raise Refused(
                f"{name} in the conditioning holds a {type(given).__name__}, which cannot be sent to the workers: remove the "
                "node that adds it, or use Load Diffusion Model."
            )


def arguments(tensors: Mapping[str, Tensor], values: Mapping[str, Value]) -> dict[str, Any]:
    """The trees that `flatten` took apart, by name."""
    root: dict[str, Any] = {}
    for name, leaf in {**values, **tensors}.items():
        *path, last = name.split(".")
        place = root
        for step in path:
            place = place.setdefault(step, {})
        place[last] = leaf
    return {name: _tree(node) for name, node in root.items()}


def _tree(node: Any) -> Any:
    if not isinstance(node, dict):
        return node
    if LENGTH in node:
        return [_tree(node[str(index)]) for index in range(node[LENGTH])]
    return {name: _tree(child) for name, child in node.items()}
