"""JoyImage: blocks of picture and text; references behind the picture."""

from __future__ import annotations

from typing import Any

from ..spread.declaration import Along, Beside, Declaration, Group, Pictured, PythonFunction, Same, Spread


def _heads(model: Any) -> tuple[int, int]:
    attention = model.double_blocks[0].attn
    return attention.num_attention_heads, attention.img_attn_proj.in_features // attention.num_attention_heads


JOYIMAGE = Declaration(
    groups=(
        Group(
            "double_blocks",
            streams={"hidden_states": Pictured(), "encoder_hidden_states": Beside()},
            arguments={"temb": Same(rows=(6,)), "image_rotary_emb": Along(("hidden_states",), dim=1)},
            attentions=(Spread(("hidden_states", "encoder_hidden_states")),),
            returns=("hidden_states", "encoder_hidden_states"),
        ),
    ),
    heads=tuple(Group(path, streams={"input": Pictured()}, returns=("input",)) for path in ("norm_out", "proj_out")),
    heads_of=PythonFunction(_heads),
    text_width=PythonFunction(lambda model: model.condition_embedder.text_embedder.linear_1.in_features),
)
