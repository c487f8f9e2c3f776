"""Lens: blocks of picture and text, which may be masked. A token is one position of the latent."""

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
    TextMask,
)

JOINT = ("hidden_states", "encoder_hidden_states")


def _heads(model: Any) -> tuple[int, int]:
    attention = model.transformer_blocks[0].attn
    return attention.heads, attention.dim_head


LENS = Declaration(
    groups=(
        BlockGroup(
            "transformer_blocks",
            streams={"hidden_states": LatentTokens(), "encoder_hidden_states": FirstPatchTokens()},
            arguments={
                "temb": Replicated(),
                "freqs_cis": PerToken(JOINT, dim=2),
                "attention_mask": TextMask("encoder_hidden_states", before=("hidden_states",)),
            },
            attentions=(DistributedAttention(JOINT),),
            returns=("encoder_hidden_states", "hidden_states"),
        ),
    ),
    output_layers=(
        BlockGroup("norm_out", streams={"x": LatentTokens()}, arguments={"conditioning": Replicated()}, returns=("x",)),
        BlockGroup("proj_out", streams={"input": LatentTokens()}, returns=("input",)),
    ),
    attention_heads=PythonFunction(_heads),
    text_width=PythonFunction(lambda model: model.txt_in.in_features),
    patch_size=PythonFunction(lambda model: 1),
    positions=("pos_embed",),
)
