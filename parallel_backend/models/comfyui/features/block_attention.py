"""Functions of ComfyUI's nodes that replace blocks and inject attention into them, in a worker."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import torch

from ....diffusion import FunctionRecipe
from ....errors import Refused
from .feature import RankFeatureCall
from .node_functions import REPLACED
from .recipe import function_from, objects_from

TOKENS, ATTENTION, BLOCK = "img", "attention", "original_block"
"""ComfyUI's names of a block's tokens, of the attention that replaces the block's own, and of the block itself."""

PROMPTS = "uuids"
"""The transformer option that identifies the prompts of a call."""

Replacement = Callable[[dict[str, Any], dict[str, Any]], Any]
"""A function that replaces a block. ComfyUI's models call it with the block's arguments and the block."""


BlockRecipe = tuple[str, int, FunctionRecipe]
"""The kind and number of a block in ComfyUI's terms, and the recipe of the function that replaces the block."""


def replacements_from(
    recipes: Sequence[BlockRecipe], block_at: Callable[[str], Any]
) -> dict[tuple[str, int], Replacement]:
    """Return the functions that replace blocks, by kind and number. The functions share the objects that they hold.

    Args:
        block_at: returns the block at a path in the form that the functions may use.
    """
    objects = objects_from([recipe for _, _, recipe in recipes])
    return {(kind, number): function_from(recipe, objects, block_at=block_at) for kind, number, recipe in recipes}


class BlockAttention(dict[tuple[str, int], Replacement]):
    """The functions that replace blocks during one run. Their state from step to step covers this rank's heads."""


def injected_attention(recipes: str, call: RankFeatureCall) -> Mapping[str, Any]:
    """Return the functions that replace blocks, which the run's first call rebuilds, and the key of the call's prompts."""
    assert call.block_at is not None, "an unsharded model takes none"
    replacements = call.of_run(BlockAttention)
    if not replacements:
        built = replacements_from(msgspec.json.decode(recipes, type=list[BlockRecipe]), call.block_at)
        replacements.update({location: injecting_attention(each) for location, each in built.items()})
    return {REPLACED: {"dit": replacements}, PROMPTS: [call.inputs.key]}


def injecting_attention(replacement: Replacement) -> Replacement:
    """Return a function that replaces a block, with a check that it injects attention and changes nothing else.

    Most of the tokens are on other ranks. The function sees only their shape, dtype and device.

    Raises:
        Refused: the returned function raises this when the replacement does anything else.
    """

    def checked(arguments: dict[str, Any], more: dict[str, Any]) -> Any:
        tokens, block = arguments[TOKENS], more[BLOCK]
        visible = {**arguments, TOKENS: _Shape(tokens.shape, tokens.dtype, tokens.device)}
        outputs: list[Any] = []
        began = False

        def run(changed: dict[str, Any]) -> Any:
            nonlocal began
            began = True
            changed_names = sorted(
                name for name in {*visible, *changed} - {ATTENTION} if changed.get(name) is not visible.get(name)
            )
            if changed_names:
                raise _refused(f"changes the block's arguments {' and '.join(changed_names)}")
            if outputs:
                raise _refused("runs the block twice")
            outputs.append(block({**changed, TOKENS: tokens}))
            return outputs[0]

        try:
            output = replacement(visible, {**more, BLOCK: run})
        except TypeError as error:
            if began:
                raise
            raise _refused("reads the values of the tokens") from error
        if not outputs or output is not outputs[0]:
            raise _refused("returns another result than the block")
        return output

    return checked


@dataclass(frozen=True)
class _Shape:
    """The properties of tokens that a function may read."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    def __getattr__(self, name: str) -> Any:
        raise _refused(f"reads {name} of the tokens")


def _refused(what: str) -> Refused:
    return Refused(
        f"a node's replacement of the model's blocks {what}, and only a replacement of their attention is supported: "
        "remove that node, or use Load Diffusion Model."
    )
