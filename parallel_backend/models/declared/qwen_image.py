"""Qwen-Image and Qwen-Image-Edit: blocks of text and picture; references behind the picture."""

from __future__ import annotations

from ..spread.declaration import (
    Along,
    Beside,
    Boundary,
    Declaration,
    Group,
    Pictured,
    PythonFunction,
    Same,
    Spread,
    TextMask,
)

QWEN_IMAGE = Declaration(
    groups=(
        Group(
            "transformer_blocks",
            streams={"hidden_states": Pictured(), "encoder_hidden_states": Beside()},
            arguments={
                "encoder_hidden_states_mask": TextMask("encoder_hidden_states"),
                "temb": Same(rows=(1, 2)),
                "image_rotary_emb": Along(("encoder_hidden_states", "hidden_states"), dim=2),
                "timestep_zero_index": Boundary("hidden_states"),
            },
            attentions=(Spread(("encoder_hidden_states", "hidden_states")),),
            modulations=("img_mod", "txt_mod"),
            returns=("encoder_hidden_states", "hidden_states"),
        ),
    ),
    heads=(
        Group("norm_out", streams={"x": Pictured()}, arguments={"conditioning_embedding": Same()}, returns=("x",)),
        Group("proj_out", streams={"input": Pictured()}, returns=("input",)),
    ),
    heads_of=PythonFunction(
        lambda model: (
            model.transformer_blocks[0].num_attention_heads,
            model.transformer_blocks[0].attention_head_dim,
        )
    ),
    text_width=PythonFunction(lambda model: model.txt_in.in_features),
    control={"input": "transformer_blocks"},
    positions=("pe_embedder",),
)
