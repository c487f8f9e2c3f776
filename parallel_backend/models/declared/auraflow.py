"""AuraFlow: double blocks of text and picture, single blocks of both behind each other."""

from __future__ import annotations

from typing import Any

from ..spread.declaration import Beside, Declaration, Group, LengthLess, Pictured, PythonFunction, Same, Spread


def _heads(model: Any) -> tuple[int, int]:
    attention = (*model.double_layers, *model.single_layers)[0].attn
    return attention.n_heads, attention.head_dim


AURAFLOW = Declaration(
    groups=(
        Group(
            "double_layers",
            streams={"c": Beside(), "x": Pictured()},
            arguments={"global_cond": Same()},
            attentions=(Spread(("c", "x")),),
            modulations=("modC", "modX"),
            returns=("c", "x"),
        ),
        Group(
            "single_layers",
            streams={"cx": Pictured(LengthLess(1))},
            arguments={"global_cond": Same()},
            attentions=(Spread(("cx",)),),
            modulations=("modCX",),
            returns=("cx",),
        ),
    ),
    heads=(Group("final_linear", streams={"input": Pictured()}, returns=("input",)),),
    heads_of=PythonFunction(_heads),
    text_width=PythonFunction(lambda model: model.cond_seq_linear.in_features),
)
