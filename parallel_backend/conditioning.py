"""Conditioning as flat names, the form in which it travels between ComfyUI and the workers.

ComfyUI's process flattens trees of conditioning. The worker rebuilds the trees, which are arguments of the model.
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
"""Last part of the flat name of a list's length."""

KIND = "@"
"""Last part of the flat name of a collection's kind, for collections other than lists."""

KINDS: Mapping[str, Callable[[list[Any]], Any]] = MappingProxyType({"tuple": tuple, "set": set, "frozenset": frozenset})
"""The classes of collections other than lists, by kind."""

CROSS_ATTENTION, CONCAT = "c_crossattn", "c_concat"
NAMES: Mapping[str, str] = MappingProxyType({CROSS_ATTENTION: "context", CONCAT: "concat"})
"""ComfyUI's names of the conditioning that all models share, mapped to the model's own names."""

OPTIONS = "transformer_options"
"""First part of the flat name of a plain value among ComfyUI's transformer_options."""

UNET_FUNCTIONS = "unet_functions"
"""Option with the recipes of functions that run after a UNet's output blocks."""

PREFIX_CACHE = "qwen_image21_cache"
"""Option that ComfyUI's QwenImage21Cache sets: the device and dtype of its cache of text and references, or "off"."""

POSE_CACHE = "pose_cache"
"""Option with the arguments from which a worker makes ComfyUI's pose cache (`features/pose_cache.py`)."""

SKIPPED_BLOCKS = "skipped_blocks"
"""Option with the blocks that a call leaves out, as [kind, number]."""

ATTENTION_GUIDANCE = "attention_guidance_functions"
"""Option with the recipes of functions that change the output of attention."""

BLOCK_ATTENTION = "block_attention"
"""Option with the recipes of functions that inject attention into blocks, by block."""

ATTENTION_OVERRIDE = "attention_override"
"""Option with the recipe of a function that replaces attention."""

TEXT_PREPARATION = "text_preparation"
"""Conditioning that requests text preparation: a dict of the further arguments of the model's `preprocess_text_embeds`."""

ASKED = "asked"
"""A key that this dict always has, because there may be no arguments and an empty dict cannot be flattened."""

BRANCHES = "cond_or_uncond"
"""ComfyUI's option with the branch of each prompt in a call's batch: 0 for the positive branch."""

CONSTANTS = "constants"
"""First part of the flat name of a tensor that belongs to all rows of a batch. ComfyUI's own name follows."""

TOGETHER = "rows_together"
"""Value: the number of consecutive rows of a call's batch that are always computed together, whatever the model."""

ALONE = "as_one_call"
"""Value: True if ComfyUI's own call has only the rows that are computed together, and no others."""

SIGMAS = ("sigmas", "sample_sigmas")
"""ComfyUI's options with the sigmas of a call and of all steps."""

SHAPES = "latent_shapes"
"""ComfyUI's name for the shapes of the latents that are packed into one latent."""


@dataclass(frozen=True)
class Conditioning:
    """Tensors and values by the model's own names. The conditioning of a whole model call also has `x` and `timestep`."""

    tensors: dict[str, Tensor]
    values: dict[str, Value] = field(default_factory=dict)


def flatten(name: str, value: Any, tensors: dict[str, Tensor], values: dict[str, Value], depth: int = 0) -> None:
    """Flatten a tree of tensors, plain values, collections and dicts into names such as `ref_latents.0`.

    Args:
        name: the flat name of the tree's root.
        value: the tree.
        tensors: receives the tensors of the tree.
        values: receives the numbers, texts, lengths and kinds of the tree.
        depth: the depth of `value` in the whole tree.

    Raises:
        Refused: the tree holds an object of another class, or is too deep.
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
            # The order of a set can change from process to process.
            ordered = sorted(value, key=repr) if isinstance(value, (set, frozenset)) else value
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
    """Return True if a flat name belongs to an entry of a dict, which ComfyUI neither casts nor repeats to the batch."""
    root, _, rest = name.partition(".")
    return bool(rest) and f"{root}.{LENGTH}" not in values


def runs_alone(tensors: Mapping[str, object], values: Mapping[str, Value]) -> bool:
    """Return True if a prompt's conditioning has a dict, so that the prompt never shares a batch with another prompt."""
    return any(in_dict(name, values) and not name.startswith(f"{OPTIONS}.") for name in (*tensors, *values))


def packed_shapes(values: Mapping[str, Value]) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of the latents that are packed into one, such as a video and its sound; empty for a single latent."""
    trees = arguments({}, {name: value for name, value in values.items() if name.partition(".")[0] == SHAPES})
    shapes = tuple(tuple(shape) for shape in trees.get(SHAPES) or ())
    return shapes if len(shapes) > 1 else ()


def picture_shape(latent_shape: Sequence[int], values: Mapping[str, Value]) -> tuple[int, ...]:
    """Return the shape of a latent, or of the video that is packed into it."""
    shapes = packed_shapes(values)
    return (latent_shape[0], *shapes[0][1:]) if shapes else tuple(latent_shape)


def arguments(tensors: Mapping[str, Tensor], values: Mapping[str, Value]) -> dict[str, Any]:
    """Rebuild the trees that `flatten` took apart, by the names of their roots."""
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
