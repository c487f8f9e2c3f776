"""Functions of ComfyUI's nodes that go into the model, in a worker: rebuilt from recipes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from ....conditioning import ATTENTION_OVERRIDE, OPTIONS
from ....diffusion import Value
from ...sequence_parallel.forward import RankForward
from ...sequence_parallel.function_override import Function, OfHeads
from .recipe import decoded, function_from, objects_from

ATTENTION_OUTPUT = "attn1_output_patch"
"""The place of functions that change the output of attention, among ComfyUI's `patches`."""

UNET_OUTPUT = "output_block_patch"
"""The place of functions between the output blocks of a UNet, among ComfyUI's `patches`."""

REPLACED = "patches_replace"
"""The option in which ComfyUI's models find the functions that replace blocks, by kind and number."""

PICTURE = "img_slice"
"""The option with the first and last position of the picture's tokens, after the text."""


def guided(recipes: str, now: RankForward) -> dict[str, list[Callable[..., Any]]]:
    """Return the patches that run functions on a rank's tokens; `recipes` are those of the functions."""
    return {ATTENTION_OUTPUT: [_on_local_tokens(function_from(recipe), now) for recipe in decoded(recipes)]}


def _on_local_tokens(function: Any, now: RankForward) -> Callable[[Tensor, Mapping[str, Any]], Tensor]:
    def guide(out: Tensor, options: Mapping[str, Any]) -> Tensor:
        block = now.attentions.block
        if block is not None and len(block.placements) == 1:  # text and picture in one stream, told in whole positions
            (placement,) = block.placements.values()
            text, _ = options[PICTURE]
            options = {**options, PICTURE: [placement.before(now.call.rank, text), out.shape[1]]}
        return function(out, options)  # type: ignore[no-any-return]

    return guide


def override_in(values: Mapping[str, Value]) -> OfHeads | None:
    """Return the function that goes with a call's values; None if there is none."""
    text = values.get(f"{OPTIONS}.{ATTENTION_OVERRIDE}")
    if text is None:
        return None
    (recipe,) = decoded(str(text))
    objects = objects_from([recipe])

    @functools.lru_cache(maxsize=8)
    def cached_function(start: int | None, stop: int | None, heads: int) -> Function:
        return function_from(recipe, objects, slice(start, stop))  # type: ignore[no-any-return]

    return lambda run, heads: cached_function(run.start, run.stop, heads)


def replacements(blocks: Iterable[Sequence[Any]]) -> dict[str, dict[tuple[Any, ...], Callable[[Any, Any], Any]]]:
    """Return functions that skip blocks, each named by kind and number: they return a block's arguments."""
    return {"dit": {tuple(block): lambda arguments, _: arguments for block in blocks}}
