"""PixArt in diffusers: blocks of the picture alone, text attended to."""

from __future__ import annotations

from ..spread.declaration import Attended, Declaration, Group, Local, Pictured, PythonFunction, Same, Spread

PIXART = Declaration(
    groups=(
        Group(
            "transformer_blocks",
            streams={"hidden_states": Pictured()},
            arguments={"timestep": Same(), "encoder_hidden_states": Attended(), "encoder_attention_mask": Attended()},
            attentions=(Spread(("hidden_states",)), Local()),
            returns=("hidden_states",),
        ),
    ),
    heads=tuple(Group(path, streams={"input": Pictured()}, returns=("input",)) for path in ("norm_out", "proj_out")),
    heads_of=PythonFunction(lambda model: (model.config.num_attention_heads, model.config.attention_head_dim)),
    text_width=PythonFunction(lambda model: model.config.caption_channels),
    patch_size=PythonFunction(lambda model: model.config.patch_size),
    joint_text=False,
)
