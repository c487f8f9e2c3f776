"""PixArt in diffusers: blocks of the picture with cross-attention to text."""

from __future__ import annotations

from ...declaration import (
    BlockGroup,
    Declaration,
    DistributedAttention,
    LatentTokens,
    PythonFunction,
    Replicated,
    ReplicatedContext,
    ReplicatedKeys,
)

PIXART = Declaration(
    groups=(
        BlockGroup(
            "transformer_blocks",
            streams={"hidden_states": LatentTokens()},
            arguments={
                "timestep": Replicated(),
                "encoder_hidden_states": ReplicatedContext(),
                "encoder_attention_mask": ReplicatedContext(),
            },
            attentions=(DistributedAttention(("hidden_states",)), ReplicatedKeys()),
            returns=("hidden_states",),
        ),
    ),
    output_layers=tuple(
        BlockGroup(path, streams={"input": LatentTokens()}, returns=("input",)) for path in ("norm_out", "proj_out")
    ),
    attention_heads=PythonFunction(lambda model: (model.config.num_attention_heads, model.config.attention_head_dim)),
    text_width=PythonFunction(lambda model: model.config.caption_channels),
    patch_size=PythonFunction(lambda model: model.config.patch_size),
    joint_text=False,
)
