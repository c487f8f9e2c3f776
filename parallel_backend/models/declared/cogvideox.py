"""CogVideoX in diffusers: blocks of text and video."""

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
)

COGVIDEOX = Declaration(
    groups=(
        BlockGroup(
            "transformer_blocks",
            streams={"encoder_hidden_states": FirstPatchTokens(), "hidden_states": LatentTokens()},
            arguments={"temb": Replicated(), "image_rotary_emb": PerToken(("hidden_states",), dim=0)},
            attentions=(DistributedAttention(("encoder_hidden_states", "hidden_states")),),
            returns=("hidden_states", "encoder_hidden_states"),
        ),
    ),
    output_layers=(
        BlockGroup("norm_final", streams={"input": LatentTokens()}, returns=("input",)),
        BlockGroup("norm_out", streams={"x": LatentTokens()}, arguments={"temb": Replicated()}, returns=("x",)),
        BlockGroup("proj_out", streams={"input": LatentTokens()}, returns=("input",)),
    ),
    attention_heads=PythonFunction(lambda model: (model.config.num_attention_heads, model.config.attention_head_dim)),
    text_width=PythonFunction(lambda model: model.config.text_embed_dim),
    patch_size=PythonFunction(
        lambda model: (model.config.patch_size_t or 1, model.config.patch_size, model.config.patch_size)
    ),
)
