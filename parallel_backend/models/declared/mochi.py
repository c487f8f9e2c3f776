"""Mochi: blocks of video and text. Padding of the text is left out."""

from __future__ import annotations

from ...declaration import (
    BlockGroup,
    Declaration,
    DistributedAttention,
    FirstPatchTokens,
    LatentTokens,
    PerToken,
    PythonFunction,
    Replicated,
    TextLength,
)

MOCHI = Declaration(
    groups=(
        BlockGroup(
            "blocks",
            streams={"x": LatentTokens(), "y": FirstPatchTokens()},
            arguments={
                "c": Replicated(),
                "rope_cos": PerToken(("x",), dim=0),
                "rope_sin": PerToken(("x",), dim=0),
                "crop_y": TextLength("y"),
            },
            attentions=(DistributedAttention(("x", "y")),),
            returns=("x", "y"),
        ),
    ),
    output_layers=(
        BlockGroup("final_layer", streams={"x": LatentTokens()}, arguments={"c": Replicated()}, returns=("x",)),
    ),
    attention_heads=PythonFunction(lambda model: (model.num_heads, model.head_dim)),
    text_width=PythonFunction(lambda model: model.t5_feat_dim),
)
