"""Functions that ComfyUI's nodes put into a model, rebuilt in a worker from recipes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from ....conditioning import ATTENTION_OVERRIDE, OPTIONS
from ....diffusion import Value
from ...sequence_parallel.compiled import OVERRIDE
from ...sequence_parallel.forward import RankForward
from ...sequence_parallel.function_override import Function, OfHeads
from .feature import PATCHES, RankFeatureCall
from .recipe import decoded, function_from, objects_from

ATTENTION_OUTPUT = "attn1_output_patch"
"""The list in ComfyUI's `patches` of functions that change the output of attention."""

UNET_OUTPUT = "output_block_patch"
"""The list in ComfyUI's `patches` of functions that run between the output blocks of a UNet."""

REPLACED = "patches_replace"
"""The transformer option with the functions that replace blocks, by kind and number."""

PICTURE = "img_slice"
"""The transformer option with the first and last position of the latent's tokens, which follow the text."""


def attention_guidance(recipes: str, call: RankFeatureCall) -> Mapping[str, Any]:
    """Return the patch that runs functions on the output of attention, on a rank's own tokens."""
    functions = [function_from(recipe) for recipe in decoded(recipes)]
    if call.forward is not None:
        functions = [_on_local_tokens(function, call.forward) for function in functions]
    return {PATCHES: {ATTENTION_OUTPUT: functions}}


def _on_local_tokens(function: Any, forward: RankForward) -> Callable[[Tensor, Mapping[str, Any]], Tensor]:
    def guide(out: Tensor, options: Mapping[str, Any]) -> Tensor:
        block = forward.attentions.block
        if block is not None and len(block.placements) == 1:  # text and latent in one stream: the positions are global
            (placement,) = block.placements.values()
            text, _ = options[PICTURE]
            options = {**options, PICTURE: [placement.before(forward.call.rank, text), out.shape[1]]}
        return function(out, options)  # type: ignore[no-any-return]

    return guide


def unet_functions(recipes: str, call: RankFeatureCall) -> Mapping[str, Any]:
    """Return the patch that runs functions between the output blocks of a UNet."""
    return {PATCHES: {UNET_OUTPUT: [function_from(recipe) for recipe in decoded(recipes)]}}


def attention_override(recipes: str, call: RankFeatureCall) -> Mapping[str, Any]:
    """Return the attention override for an unsharded model. A parallel forward has it already (`override_in`)."""
    return {} if call.forward is not None else {OVERRIDE: _override_from(recipes)(slice(None), 0)}


def override_in(values: Mapping[str, Value]) -> OfHeads | None:
    """Return the attention override among a call's values; None if there is none."""
    recipes = values.get(f"{OPTIONS}.{ATTENTION_OVERRIDE}")
    return None if recipes is None else _override_from(str(recipes))


def _override_from(recipes: str) -> OfHeads:
    (recipe,) = decoded(recipes)
    objects = objects_from([recipe])

    @functools.lru_cache(maxsize=8)
    def cached_function(start: int | None, stop: int | None, heads: int) -> Function:
        return function_from(recipe, objects, slice(start, stop))  # type: ignore[no-any-return]

    return lambda run, heads: cached_function(run.start, run.stop, heads)


def skipped_blocks(blocks: Iterable[Sequence[Any]], call: RankFeatureCall) -> Mapping[str, Any]:
    """Return functions that skip blocks by returning a block's arguments. `blocks` are pairs of kind and number."""
    return {REPLACED: {"dit": {tuple(block): lambda arguments, _: arguments for block in blocks}}}
