"""Lens: blocks of picture and text, which may be masked; a token is one place of the latent."""

from __future__ import annotations

from typing import Any

from ..spread.declaration import Along, Beside, Declaration, Group, Pictured, PythonFunction, Same, Spread, TextMask

JOINT = ("hidden_states", "encoder_hidden_states")


def _heads(model: Any) -> tuple[int, int]:
    attention = model.transformer_blocks[0].attn
    return attention.heads, attention.dim_head


LENS = Declaration(
    groups=(
        Group(
            "transformer_blocks",
            streams={"hidden_states": Pictured(), "encoder_hidden_states": Beside()},
            arguments={
                "temb": Same(),
                "freqs_cis": Along(JOINT, dim=2),
                "attention_mask": TextMask("encoder_hidden_states", before=("hidden_states",)),
            },
            attentions=(Spread(JOINT),),
            returns=("encoder_hidden_states", "hidden_states"),
        ),
    ),
    heads=(
        Group("norm_out", streams={"x": Pictured()}, arguments={"conditioning": Same()}, returns=("x",)),
        Group("proj_out", streams={"input": Pictured()}, returns=("input",)),
    ),
    heads_of=PythonFunction(_heads),
    text_width=PythonFunction(lambda model: model.txt_in.in_features),
    patch_size=PythonFunction(lambda model: 1),
    positions=("pos_embed",),
)
