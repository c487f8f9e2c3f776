"""Functions of ComfyUI's nodes that change the output of attention or of UNet blocks, in a worker."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from ...sequence_parallel.forward import RankForward
from .recipe import decoded, function_from

ATTENTION_OUTPUT = "attn1_output_patch"
"""The place of functions that change the output of attention, among ComfyUI's `patches`."""

UNET_OUTPUT = "output_block_patch"
"""The place of functions between the output blocks of a UNet, among ComfyUI's `patches`."""

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
