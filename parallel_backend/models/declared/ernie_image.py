"""ERNIE-Image: blocks of picture and text, one behind the other; a token is one place of the latent."""

from __future__ import annotations

from typing import Any

from ..spread.declaration import Along, Declaration, Group, Pictured, PythonFunction, Same, Spread


def _text_width(model: Any) -> int:
    width: int = model.hidden_size if model.text_proj is None else model.text_proj.in_features
    return width


ERNIE_IMAGE = Declaration(
    groups=(
        Group(
            "layers",
            streams={"x": Pictured()},
            arguments={"rotary_pos_emb": Along(("x",), dim=1), "temb": Same()},
            attentions=(Spread(("x",)),),
            returns=("x",),
            attends_in="comfy.ldm.ernie.model",
        ),
    ),
    heads=(
        Group("final_norm", streams={"x": Pictured()}, arguments={"conditioning": Same()}, returns=("x",)),
        Group("final_linear", streams={"input": Pictured()}, returns=("input",)),
    ),
    heads_of=PythonFunction(lambda model: (model.num_heads, model.head_dim)),
    text_width=PythonFunction(_text_width),
    positions=("pos_embed",),
)
