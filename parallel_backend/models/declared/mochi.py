"""Mochi: blocks of video and text, whose padding takes no part."""

from __future__ import annotations

from ..spread.declaration import Along, Beside, Declaration, Group, Pictured, PythonFunction, Same, Spread, TextLength

MOCHI = Declaration(
    groups=(
        Group(
            "blocks",
            streams={"x": Pictured(), "y": Beside()},
            arguments={
                "c": Same(),
                "rope_cos": Along(("x",), dim=0),
                "rope_sin": Along(("x",), dim=0),
                "crop_y": TextLength("y"),
            },
            attentions=(Spread(("x", "y")),),
            returns=("x", "y"),
        ),
    ),
    heads=(Group("final_layer", streams={"x": Pictured()}, arguments={"c": Same()}, returns=("x",)),),
    heads_of=PythonFunction(lambda model: (model.num_heads, model.head_dim)),
    text_width=PythonFunction(lambda model: model.t5_feat_dim),
)
