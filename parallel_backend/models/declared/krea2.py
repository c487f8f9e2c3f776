"""Krea 2: blocks of text, picture and references, one behind the other; text is fused on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..spread.declaration import Along, Attention, Boundary, Declaration, Group, Pictured, PythonFunction, Same, Spread


def _attentions(block: Any) -> Sequence[Attention]:
    return (Spread(("x",), kv_heads=block.attn.kvheads),)


KREA2 = Declaration(
    groups=(
        Group(
            "blocks",
            streams={"x": Pictured()},
            arguments={
                "vec": Same(rows=(1, 2)),
                "freqs": Along(("x",), dim=2),
                "timestep_zero_index": Boundary("x"),
            },
            attentions=PythonFunction(_attentions),
            returns=("x",),
        ),
    ),
    heads=(Group("last", streams={"x": Pictured()}, arguments={"tvec": Same()}, returns=("x",)),),
    heads_of=PythonFunction(lambda model: (model.heads, model.blocks[0].attn.headdim)),
    text_width=PythonFunction(lambda model: model.txtlayers * model.txtdim),
    patch_size=PythonFunction(lambda model: model.patch),
    embeddings=(Group("first", streams={"input": Pictured()}, returns=("input",)),),
    positions=("pe_embedder",),
)
