"""Attention that a node of ComfyUI's hands to blocks by standing in for them, in a worker: made of ComfyUI's own code."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import torch

from ....diffusion import FunctionRecipe
from ....errors import Refused
from .recipe import function_from, objects_from

TOKENS, ATTENTION, BLOCK = "img", "attention", "original_block"
"""ComfyUI's names: of what a block is given its tokens, and attention in its own's place; and the block itself."""

Replacement = Callable[[dict[str, Any], dict[str, Any]], Any]
"""As ComfyUI's models call what stands in for a block: with its arguments and the block."""


BlockRecipe = tuple[str, int, FunctionRecipe]
"""The kind and number of a block in ComfyUI's words, and the recipe of the function that replaces the block."""


def replacements_from(
    recipes: Sequence[BlockRecipe], block_at: Callable[[str], Any]
) -> dict[tuple[str, int], Replacement]:
    """Return the functions that replace blocks, by kind and number; they share the objects that they hold.

    Args:
        block_at: returns the block at a path, as the functions see it.
    """
    objects = objects_from([recipe for _, _, recipe in recipes])
    return {(kind, number): function_from(recipe, objects, block_at=block_at) for kind, number, recipe in recipes}


class BlockAttention:
    """What stands in for blocks during one run: what it keeps from step to step is of this rank's heads."""

    def __init__(self) -> None:
        self._replacements: dict[tuple[str, int], Replacement] = {}

    def replacements(
        self, recipes: str, block_at: Callable[[str], Any]
    ) -> dict[str, dict[tuple[str, int], Replacement]]:
        """Return ComfyUI's `patches_replace`, made of the recipes in the run's first call."""
        if not self._replacements:
            built = replacements_from(msgspec.json.decode(recipes, type=list[BlockRecipe]), block_at)
            self._replacements = {location: handing_attention(each) for location, each in built.items()}
        return {"dit": self._replacements}


def handing_attention(replacement: Replacement) -> Replacement:
    """What stands in for a block, held to this: it hands the block attention, and changes nothing else.

    Of tokens, most of which are on other ranks, it sees how many there are.
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
                raise _refused(f"changes {' and '.join(changed_names)} of its arguments")
            if outputs:
                raise _refused("runs it twice")
            outputs.append(block({**changed, TOKENS: tokens}))
            return outputs[0]

        try:
            output = replacement(visible, {**more, BLOCK: run})
        except TypeError as error:
            if began:
                raise
            raise _refused("looks at more of its tokens than how many they are") from error
        if not outputs or output is not outputs[0]:
            raise _refused("gives something else than the block does")
        return output

    return checked


@dataclass(frozen=True)
class _Shape:
    """All that is told of tokens."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    def __getattr__(self, name: str) -> Any:
        raise _refused(f"looks at {name} of its tokens")


def _refused(what: str) -> Refused:
    return Refused(
        f"what a node puts in the place of the model's blocks {what}, where this pack knows of attention alone: remove that "
        "node, or use Load Diffusion Model."
    )
