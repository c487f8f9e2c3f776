"""OmniGen 2 and Boogu: refiners of the picture, then blocks of one stream: text, references, picture.

The refiners of the text and of the references run on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...declaration import (
    AlignedToEnd,
    Attention,
    BlockGroup,
    Declaration,
    DistributedAttention,
    FirstPatchTokens,
    LatentTokens,
    PerToken,
    PythonFunction,
    Replicated,
    StreamKind,
)

LAST = LatentTokens(AlignedToEnd())
"""The picture's tokens are the last ones: references precede them."""


def _attentions(block: Any) -> Sequence[Attention]:
    return (DistributedAttention(("hidden_states",), kv_heads=block.attn.kv_heads),)


def _single(path: str) -> BlockGroup:
    return BlockGroup(
        path,
        streams={"hidden_states": LAST},
        arguments={"image_rotary_emb": PerToken(("hidden_states",), dim=1), "temb": Replicated()},
        attentions=PythonFunction(_attentions),
        returns=("hidden_states",),
    )


def _declaration(*groups: BlockGroup) -> Declaration:
    head = {"conditioning_embedding": Replicated()}
    streams: dict[str, StreamKind] = {"x": LAST}
    return Declaration(
        groups=groups,
        output_layers=(BlockGroup("norm_out", streams=streams, arguments=head, returns=("x",)),),
        attention_heads=PythonFunction(_heads),
        text_width=PythonFunction(lambda model: model.time_caption_embed.caption_embedder[1].in_features),
    )


def _heads(model: Any) -> tuple[int, int]:
    attention = model.noise_refiner[0].attn
    return attention.heads, attention.dim_head


JOINT = ("instruct_hidden_states", "img_hidden_states")


def _double_attentions(block: Any) -> Sequence[Attention]:
    joint, own = block.img_instruct_attn.kv_heads, block.img_self_attn.kv_heads
    return DistributedAttention(JOINT, kv_heads=joint), DistributedAttention(("img_hidden_states",), kv_heads=own)


DOUBLE = BlockGroup(
    "double_stream_layers",
    streams={"img_hidden_states": LAST, "instruct_hidden_states": FirstPatchTokens()},
    arguments={
        "joint_rotary_emb": PerToken(JOINT, dim=1),
        "img_rotary_emb": PerToken(("img_hidden_states",), dim=1),
        "temb": Replicated(),
    },
    attentions=PythonFunction(_double_attentions),
    returns=("img_hidden_states", "instruct_hidden_states"),
)

OMNIGEN2 = _declaration(_single("noise_refiner"), _single("layers"))
BOOGU = _declaration(_single("noise_refiner"), DOUBLE, _single("single_stream_layers"))
