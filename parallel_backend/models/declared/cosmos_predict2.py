"""Cosmos-Predict2 and Anima: blocks of a grid of tokens, a timestep a frame, text attended to."""

from __future__ import annotations

from ..spread.declaration import (
    Along,
    Argument,
    Attended,
    ByFrame,
    Declaration,
    Group,
    Local,
    Pictured,
    PythonFunction,
    Spread,
)

X = "x_B_T_H_W_D"
MODULATION: dict[str, Argument] = {"emb_B_T_D": ByFrame(X, dims=3), "adaln_lora_B_T_3D": ByFrame(X, dims=3)}

COSMOS_PREDICT2 = Declaration(
    groups=(
        Group(
            "blocks",
            streams={X: Pictured(grid=True)},
            arguments={**MODULATION, "crossattn_emb": Attended(), "rope_emb_L_1_1_D": Along((X,), dim=1)},
            attentions=(Spread((X,)), Local()),
            returns=(X,),
        ),
    ),
    heads=(Group("final_layer", streams={X: Pictured(grid=True)}, arguments=MODULATION, returns=(X,)),),
    heads_of=PythonFunction(lambda model: (model.num_heads, model.model_channels // model.num_heads)),
    text_width=PythonFunction(lambda model: model.blocks[0].cross_attn.context_dim),
    joint_text=False,
    compute=lambda model: model.build_pos_embed(device="cpu"),
    patch_size=PythonFunction(lambda model: (model.patch_temporal, model.patch_spatial, model.patch_spatial)),
)
