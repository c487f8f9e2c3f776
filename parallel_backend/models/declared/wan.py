"""Wan 2.1 and 2.2: blocks of the video with cross-attention to text.

VACE has control blocks next to them. SCAIL's poses follow the video's tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace
from torch import nn

from ...declaration import (
    AlignedToEnd,
    Attention,
    BlockGroup,
    Declaration,
    DistributedAttention,
    LatentTokens,
    PerFrame,
    PerToken,
    PythonFunction,
    Replicated,
    ReplicatedContext,
    ReplicatedKeys,
    TokensOfLatents,
)

STEP = (1, 2, 2)
"""The latent values of one token in frames, height and width."""

TRAILING_LATENTS = ("time_dim_concat", "context_latents")
"""Latents whose tokens follow the video's: Phantom's and Bernini's references."""


LAST = AlignedToEnd()
"""The video's tokens are the last ones: a reference frame may precede them (Fun's `ref_conv`)."""

VIDEO = LatentTokens(LAST, trailing=TokensOfLatents(TRAILING_LATENTS, STEP))


def attentions(block: nn.Module) -> Sequence[Attention]:
    """Return a block's attentions: to itself, to the first frame's features if the model has them, and to the text."""
    pictured = hasattr(block.cross_attn, "k_img")
    return (
        DistributedAttention(("c",) if hasattr(block, "after_proj") else ("x",)),
        *[ReplicatedKeys()] * (2 if pictured else 1),
    )


def _arguments(stream: str) -> dict[str, Any]:
    return {
        "e": PerFrame(stream, dims=4),
        "freqs": PerToken((stream,), dim=1),
        "context": ReplicatedContext(),
        "context_img_len": Replicated(),
    }


BLOCKS = BlockGroup(
    "blocks", streams={"x": VIDEO}, arguments=_arguments("x"), attentions=PythonFunction(attentions), returns=("x",)
)
CONTROL = BlockGroup(
    "vace_blocks",
    streams={"c": VIDEO, "x": VIDEO},
    arguments=_arguments("c"),
    attentions=PythonFunction(attentions),
    returns=("c", "c"),
)
HEAD = BlockGroup("head", streams={"x": VIDEO}, arguments={"e": PerFrame("x", dims=3)}, returns=("x",))


def _heads(model: Any) -> tuple[int, int]:
    return model.num_heads, model.dim // model.num_heads


def _with_control(model: Any) -> list[list[str]]:
    """Return the units of blocks. A block and the control block that adds to it form one unit, so one stage holds both."""
    control = model.vace_layers_mapping
    return [
        [f"blocks.{index}", *([f"vace_blocks.{control[index]}"] if index in control else [])]
        for index in range(len(model.blocks))
    ]


WAN = Declaration(
    groups=(BLOCKS,),
    output_layers=(HEAD,),
    attention_heads=PythonFunction(_heads),
    text_width=PythonFunction(lambda model: model.text_embedding[0].in_features),
    joint_text=False,
    positions=("rope_embedder",),
    per_token_conditioning={"camera_conditions": (1, 8, 8)},  # in pixels
    per_frame_conditioning=frozenset({"time_dim_concat"}),
)
WAN_VACE = replace(
    WAN,
    groups=(BLOCKS, CONTROL),
    units=PythonFunction(_with_control),
    per_token_conditioning={**WAN.per_token_conditioning, "vace_context": (1, 1, 1)},
)

SCAIL = LatentTokens(LAST, trailing=TokensOfLatents((*TRAILING_LATENTS, "pose_latents"), STEP))
WAN_SCAIL = replace(WAN, groups=(replace(BLOCKS, streams={"x": SCAIL}),), references=frozenset({"pose_latents"}))
