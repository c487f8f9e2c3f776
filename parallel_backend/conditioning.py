"""Conditioning as flat names: what travels between ComfyUI and the workers, and the arguments of the model it becomes.

Both processes use it: one takes a tree apart, the other puts it together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from torch import Tensor

from .diffusion import Value
from .errors import Refused

MAX_DEPTH = 4
LENGTH = "#"
"""Ends the name under which the length of a list stands."""

KIND = "@"
"""Ends the name under which the kind of a collection stands that is no list."""

KINDS: Mapping[str, Callable[[list[Any]], Any]] = MappingProxyType({"tuple": tuple, "set": set, "frozenset": frozenset})
"""Such collections, by kind."""

CROSS_ATTENTION, CONCAT = "c_crossattn", "c_concat"
NAMES: Mapping[str, str] = MappingProxyType({CROSS_ATTENTION: "context", CONCAT: "concat"})
"""ComfyUI's names of the conditioning of all models -> the model's own."""

OPTIONS = "transformer_options"
"""Plain values of these options go under this name."""

UNET_FUNCTIONS = "unet_functions"
"""Functions after a UNet's output blocks go under this name among these options, as their recipes."""

PREFIX_CACHE = "qwen_image21_cache"
"""The option that ComfyUI's QwenImage21Cache sets: the device of the cache of text and references, or "off", and its dtype."""

POSE_CACHE = "pose_cache"
"""What ComfyUI's cache of poses is made with (features/pose_cache.py) goes under this name among these options."""

SKIPPED_BLOCKS = "skipped_blocks"
"""Blocks that are left out of a call, as [kind, number], go under this name among these options."""

ATTENTION_GUIDANCE = "attention_guidance_functions"
"""Functions that change the output of attention go under this name among these options, as their recipes."""

BLOCK_ATTENTION = "block_attention"
"""Functions that inject attention into blocks go under this name among these options, as recipes by block."""

ATTENTION_OVERRIDE = "attention_override"
"""A function that replaces attention goes under this name among these options, as its recipe."""

TEXT_PREPARATION = "text_preparation"
"""The conditioning that asks for a text to be prepared: the arguments of the model's `preprocess_text_embeds` besides it."""

ASKED = "asked"
"""An entry of that which is always there, as there may be no arguments."""

SIDES = "cond_or_uncond"
"""ComfyUI's name among these options of the sides in a call's batch, 0 for the positive one."""

CONSTANTS = "constants"
"""Tensors that belong to all rows of a batch, by ComfyUI's names of them, go under this name."""

TOGETHER = "rows_together"
"""How many rows of a call's batch are not computed apart, whatever the model."""

ALONE = "as_one_call"
"""Says that ComfyUI has no other rows in its call than those that are computed together."""

SIGMAS = ("sigmas", "sample_sigmas")
"""ComfyUI's names among these options of the sigmas of a call and of all steps."""

SHAPES = "latent_shapes"
"""ComfyUI's name of the shapes of the latents that are packed in one."""


@dataclass(frozen=True)
class Conditioning:
    """Tensors and values by the model's own names; those of a whole call have `x` and `timestep` too."""

    tensors: dict[str, Tensor]
    values: dict[str, Value] = field(default_factory=dict)


def flatten(name: str, value: Any, tensors: dict[str, Tensor], values: dict[str, Value], depth: int = 0) -> None:
    """Put a tree of tensors, numbers, words, lists and other collections and dicts under names such as `ref_latents.0`.

    Raises:
        Refused: it holds something else, or is too deep.
    """
    if depth > MAX_DEPTH:
        raise Refused(
            f"{name} in the conditioning is nested too deeply to be sent to the workers: remove the node that adds it."
        )
    match value:
        case Tensor():
            tensors[name] = value
        case None | bool() | int() | float() | str():
            values[name] = value
        case list() | tuple() | set() | frozenset():
            if (kind := type(value).__name__) in KINDS:
                values[f"{name}.{KIND}"] = kind
            values[f"{name}.{LENGTH}"] = len(value)
            ordered = sorted(value, key=repr) if isinstance(value, (set, frozenset)) else value  # as on any other day
            for index, item in enumerate(ordered):
                flatten(f"{name}.{index}", item, tensors, values, depth + 1)
        case dict() if value and all(
            isinstance(key, str) and key and not key.isdigit() and "." not in key for key in value
        ):
            for key, item in value.items():
                flatten(f"{name}.{key}", item, tensors, values, depth + 1)
        case _:
            raise Refused(
                f"{name} in the conditioning holds a {type(value).__name__}, which cannot be sent to the workers: remove the "
                "node that adds it, or use Load Diffusion Model."
            )


def in_dict(name: str, values: Mapping[str, Value]) -> bool:
    """Whether a flat name is of something in a dict, which ComfyUI neither casts nor repeats to the batch."""
    root, _, rest = name.partition(".")
    return bool(rest) and f"{root}.{LENGTH}" not in values


def runs_alone(tensors: Mapping[str, object], values: Mapping[str, Value]) -> bool:
    """Whether a prompt has a dict with it, and so never shares a batch with another."""
    return any(in_dict(name, values) and not name.startswith(f"{OPTIONS}.") for name in (*tensors, *values))


def packed_shapes(values: Mapping[str, Value]) -> tuple[tuple[int, ...], ...]:
    """The shapes of the latents that are packed in one, such as a video's and its sound's; none if there is but one."""
    trees = arguments({}, {name: value for name, value in values.items() if name.partition(".")[0] == SHAPES})
    shapes = tuple(tuple(shape) for shape in trees.get(SHAPES) or ())
    return shapes if len(shapes) > 1 else ()


def picture_shape(latent_shape: Sequence[int], values: Mapping[str, Value]) -> tuple[int, ...]:
    """The shape of a latent, or of the video packed in it."""
    shapes = packed_shapes(values)
    return (latent_shape[0], *shapes[0][1:]) if shapes else tuple(latent_shape)


def arguments(tensors: Mapping[str, Tensor], values: Mapping[str, Value]) -> dict[str, Any]:
    """The trees that `flatten` took apart, by name."""
    root: dict[str, Any] = {}
    for name, leaf in {**values, **tensors}.items():
        *path, last = name.split(".")
        branch = root
        for step in path:
            branch = branch.setdefault(step, {})
        branch[last] = leaf
    return {name: _tree(node) for name, node in root.items()}


def _tree(node: Any) -> Any:
    if not isinstance(node, dict):
        return node
    if LENGTH in node:
        items = [_tree(node[str(index)]) for index in range(node[LENGTH])]
        return KINDS[node[KIND]](items) if KIND in node else items
    return {name: _tree(child) for name, child in node.items()}
