"""ERNIE-Image: blocks of one stream, the picture followed by the text. A token is one position of the latent."""

from __future__ import annotations

from typing import Any

from ...declaration import (
    BlockGroup,
    Declaration,
    DistributedAttention,
    LatentTokens,
    PerToken,
    PythonFunction,
    Replicated,
)


def _text_width(model: Any) -> int:
    width: int = model.hidden_size if model.text_proj is None else model.text_proj.in_features
    return width


ERNIE_IMAGE = Declaration(
    groups=(
        BlockGroup(
            "layers",
            streams={"x": LatentTokens()},
            arguments={"rotary_pos_emb": PerToken(("x",), dim=1), "temb": Replicated()},
            attentions=(DistributedAttention(("x",)),),
            returns=("x",),
            attention_module="comfy.ldm.ernie.model",
        ),
    ),
    output_layers=(
        BlockGroup(
            "final_norm", streams={"x": LatentTokens()}, arguments={"conditioning": Replicated()}, returns=("x",)
        ),
        BlockGroup("final_linear", streams={"input": LatentTokens()}, returns=("input",)),
    ),
    attention_heads=PythonFunction(lambda model: (model.num_heads, model.head_dim)),
    text_width=PythonFunction(_text_width),
    positions=("pos_embed",),
)
