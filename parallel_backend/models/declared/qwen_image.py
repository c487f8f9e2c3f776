"""Qwen-Image and Qwen-Image-Edit: blocks of text and picture. References follow the picture's tokens."""

from __future__ import annotations

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
    TokenPosition,
)

QWEN_IMAGE = Declaration(
    groups=(
        BlockGroup(
            "transformer_blocks",
            streams={"hidden_states": LatentTokens(), "encoder_hidden_states": FirstPatchTokens()},
            arguments={
                "encoder_hidden_states_mask": TextMask("encoder_hidden_states"),
                "temb": Replicated(vectors=(1, 2)),
                "image_rotary_emb": PerToken(("encoder_hidden_states", "hidden_states"), dim=2),
                "timestep_zero_index": TokenPosition("hidden_states"),
            },
            attentions=(DistributedAttention(("encoder_hidden_states", "hidden_states")),),
            modulations=("img_mod", "txt_mod"),
            returns=("encoder_hidden_states", "hidden_states"),
        ),
    ),
    output_layers=(
        BlockGroup(
            "norm_out",
            streams={"x": LatentTokens()},
            arguments={"conditioning_embedding": Replicated()},
            returns=("x",),
        ),
        BlockGroup("proj_out", streams={"input": LatentTokens()}, returns=("input",)),
    ),
    attention_heads=PythonFunction(
        lambda model: (
            model.transformer_blocks[0].num_attention_heads,
            model.transformer_blocks[0].attention_head_dim,
        )
    ),
    text_width=PythonFunction(lambda model: model.txt_in.in_features),
    control={"input": "transformer_blocks"},
    positions=("pe_embedder",),
)
