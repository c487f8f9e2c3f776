"""JoyImage: blocks of picture and text. References follow the picture's tokens."""

from __future__ import annotations

from typing import Any

from ...declaration import (
    BlockGroup,
    Declaration,
    DistributedAttention,
    FirstPatchTokens,
    LatentTokens,
    PerToken,
    PythonFunction,
    Replicated,
)


def _heads(model: Any) -> tuple[int, int]:
    attention = model.double_blocks[0].attn
    return attention.num_attention_heads, attention.img_attn_proj.in_features // attention.num_attention_heads


JOYIMAGE = Declaration(
    groups=(
        BlockGroup(
            "double_blocks",
            streams={"hidden_states": LatentTokens(), "encoder_hidden_states": FirstPatchTokens()},
            arguments={"temb": Replicated(vectors=(6,)), "image_rotary_emb": PerToken(("hidden_states",), dim=1)},
            attentions=(DistributedAttention(("hidden_states", "encoder_hidden_states")),),
            returns=("hidden_states", "encoder_hidden_states"),
        ),
    ),
    output_layers=tuple(
        BlockGroup(path, streams={"input": LatentTokens()}, returns=("input",)) for path in ("norm_out", "proj_out")
    ),
    attention_heads=PythonFunction(_heads),
    text_width=PythonFunction(lambda model: model.condition_embedder.text_embedder.linear_1.in_features),
)
