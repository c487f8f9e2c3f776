"""Ideogram 4: blocks of text and picture, one behind the other; a token is one place of the latent."""

from __future__ import annotations

from typing import Any

from ..spread.declaration import Along, Declaration, Group, LengthLess, Pictured, PythonFunction, Same, Spread

PICTURE = Pictured(LengthLess(1))


def _heads(model: Any) -> tuple[int, int]:
    attention = model.layers[0].attention
    return attention.num_heads, attention.head_dim


IDEOGRAM4 = Declaration(
    groups=(
        Group(
            "layers",
            streams={"x": PICTURE},
            arguments={"freqs_cis": Along(("x",), dim=1), "adaln_input": Same()},
            attentions=(Spread(("x",)),),
            returns=("x",),
        ),
    ),
    heads=(Group("final_layer", streams={"x": PICTURE}, arguments={"c": Same()}, returns=("x",)),),
    heads_of=PythonFunction(_heads),
    text_width=PythonFunction(lambda model: model.llm_cond_proj.in_features),
    patch_size=PythonFunction(lambda model: 1),
)
