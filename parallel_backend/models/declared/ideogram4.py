"""Ideogram 4: blocks of one stream, the text followed by the picture. A token is one position of the latent."""

from __future__ import annotations

from typing import Any

from ...declaration import (
    AlignedToEnd,
    BlockGroup,
    Declaration,
    DistributedAttention,
    LatentTokens,
    PerToken,
    PythonFunction,
    Replicated,
)

PICTURE = LatentTokens(AlignedToEnd())


def _heads(model: Any) -> tuple[int, int]:
    attention = model.layers[0].attention
    return attention.num_heads, attention.head_dim


IDEOGRAM4 = Declaration(
    groups=(
        BlockGroup(
            "layers",
            streams={"x": PICTURE},
            arguments={"freqs_cis": PerToken(("x",), dim=1), "adaln_input": Replicated()},
            attentions=(DistributedAttention(("x",)),),
            returns=("x",),
        ),
    ),
    output_layers=(BlockGroup("final_layer", streams={"x": PICTURE}, arguments={"c": Replicated()}, returns=("x",)),),
    attention_heads=PythonFunction(_heads),
    text_width=PythonFunction(lambda model: model.llm_cond_proj.in_features),
    patch_size=PythonFunction(lambda model: 1),
)
