"""CogVideoX in diffusers: blocks of text and video."""

from __future__ import annotations

from ..spread.declaration import Along, Beside, Declaration, Group, Pictured, PythonFunction, Same, Spread

COGVIDEOX = Declaration(
    groups=(
        Group(
            "transformer_blocks",
            streams={"encoder_hidden_states": Beside(), "hidden_states": Pictured()},
            arguments={"temb": Same(), "image_rotary_emb": Along(("hidden_states",), dim=0)},
            attentions=(Spread(("encoder_hidden_states", "hidden_states")),),
            returns=("hidden_states", "encoder_hidden_states"),
        ),
    ),
    heads=(
        Group("norm_final", streams={"input": Pictured()}, returns=("input",)),
        Group("norm_out", streams={"x": Pictured()}, arguments={"temb": Same()}, returns=("x",)),
        Group("proj_out", streams={"input": Pictured()}, returns=("input",)),
    ),
    heads_of=PythonFunction(lambda model: (model.config.num_attention_heads, model.config.attention_head_dim)),
    text_width=PythonFunction(lambda model: model.config.text_embed_dim),
    patch_size=PythonFunction(
        lambda model: (model.config.patch_size_t or 1, model.config.patch_size, model.config.patch_size)
    ),
)
