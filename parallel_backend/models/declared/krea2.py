"""Krea 2: blocks of one stream: text, picture, references. Every rank fuses the text's layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...declaration import (
    Attention,
    BlockGroup,
    Declaration,
    DistributedAttention,
    LatentTokens,
    PerToken,
    PythonFunction,
    Replicated,
    TokenPosition,
)


def _attentions(block: Any) -> Sequence[Attention]:
    return (DistributedAttention(("x",), kv_heads=block.attn.kvheads),)


KREA2 = Declaration(
    groups=(
        BlockGroup(
            "blocks",
            streams={"x": LatentTokens()},
            arguments={
                "vec": Replicated(vectors=(1, 2)),
                "freqs": PerToken(("x",), dim=2),
                "timestep_zero_index": TokenPosition("x"),
            },
            attentions=PythonFunction(_attentions),
            returns=("x",),
        ),
    ),
    output_layers=(
        BlockGroup("last", streams={"x": LatentTokens()}, arguments={"tvec": Replicated()}, returns=("x",)),
    ),
    attention_heads=PythonFunction(lambda model: (model.heads, model.blocks[0].attn.headdim)),
    text_width=PythonFunction(lambda model: model.txtlayers * model.txtdim),
    patch_size=PythonFunction(lambda model: model.patch),
    embeddings=(BlockGroup("first", streams={"input": LatentTokens()}, returns=("input",)),),
    positions=("pe_embedder",),
)
