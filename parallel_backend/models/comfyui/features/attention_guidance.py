"""Functions of ComfyUI's nodes that change what attentions give, in a worker."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from ....diffusion import GuidanceFunction
from ...sequence_parallel.forward import RankForward
from .guidance import guidance_function

PLACE = "attn1_output_patch"
"""Where ComfyUI's models look for them among `patches`."""

PICTURE = "img_slice"
"""The option that says where the picture lies behind the text."""


def guided(functions: Sequence[Mapping[str, Any]], now: RankForward) -> dict[str, list[Callable[..., Any]]]:
    """The patches that do what such functions do on a rank's tokens; `functions` are theirs, as the host tells them."""
    return {
        point: [_on_local_tokens(each, now) for each in functions_there]
        for point, functions_there in guided_whole(functions).items()
    }


def guided_whole(functions: Sequence[Mapping[str, Any]]) -> dict[str, list[Callable[..., Any]]]:
    """The patches themselves, for a forward that has all tokens."""
    return {PLACE: [guidance_function(GuidanceFunction(**guide)) for guide in functions]}


def _on_local_tokens(function: Any, now: RankForward) -> Callable[[Tensor, Mapping[str, Any]], Tensor]:
    def guide(out: Tensor, options: Mapping[str, Any]) -> Tensor:
        block = now.attentions.block
        if block is not None and len(block.placements) == 1:  # text and picture in one stream, told in whole positions
            (placement,) = block.placements.values()
            text, _ = options[PICTURE]
            options = {**options, PICTURE: [placement.before(now.call.rank, text), out.shape[1]]}
        return function(out, options)  # type: ignore[no-any-return]

    return guide
