"""Cosmos-Predict2 and Anima: blocks of a grid of tokens with a timestep for each frame and cross-attention to text."""

from __future__ import annotations

from ...declaration import (
    Argument,
    BlockGroup,
    Declaration,
    DistributedAttention,
    LatentTokens,
    PerFrame,
    PerToken,
    PythonFunction,
    ReplicatedContext,
    ReplicatedKeys,
)

X = "x_B_T_H_W_D"
MODULATION: dict[str, Argument] = {"emb_B_T_D": PerFrame(X, dims=3), "adaln_lora_B_T_3D": PerFrame(X, dims=3)}

COSMOS_PREDICT2 = Declaration(
    groups=(
        BlockGroup(
            "blocks",
            streams={X: LatentTokens(grid=True)},
            arguments={**MODULATION, "crossattn_emb": ReplicatedContext(), "rope_emb_L_1_1_D": PerToken((X,), dim=1)},
            attentions=(DistributedAttention((X,)), ReplicatedKeys()),
            returns=(X,),
        ),
    ),
    output_layers=(
        BlockGroup("final_layer", streams={X: LatentTokens(grid=True)}, arguments=MODULATION, returns=(X,)),
    ),
    attention_heads=PythonFunction(lambda model: (model.num_heads, model.model_channels // model.num_heads)),
    text_width=PythonFunction(lambda model: model.blocks[0].cross_attn.context_dim),
    joint_text=False,
    patch_size=PythonFunction(lambda model: (model.patch_temporal, model.patch_spatial, model.patch_spatial)),
)
