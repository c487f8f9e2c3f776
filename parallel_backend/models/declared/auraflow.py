"""AuraFlow: double blocks of text and picture, and single blocks of one stream, text then picture."""

from __future__ import annotations

from typing import Any

from ...declaration import (
    AlignedToEnd,
    BlockGroup,
    Declaration,
    DistributedAttention,
    FirstPatchTokens,
    LatentTokens,
    PythonFunction,
    Replicated,
)


def _heads(model: Any) -> tuple[int, int]:
    attention = (*model.double_layers, *model.single_layers)[0].attn
    return attention.n_heads, attention.head_dim


AURAFLOW = Declaration(
    groups=(
        BlockGroup(
            "double_layers",
            streams={"c": FirstPatchTokens(), "x": LatentTokens()},
            arguments={"global_cond": Replicated()},
            attentions=(DistributedAttention(("c", "x")),),
            modulations=("modC", "modX"),
            returns=("c", "x"),
        ),
        BlockGroup(
            "single_layers",
            streams={"cx": LatentTokens(AlignedToEnd())},
            arguments={"global_cond": Replicated()},
            attentions=(DistributedAttention(("cx",)),),
            modulations=("modCX",),
            returns=("cx",),
        ),
    ),
    output_layers=(BlockGroup("final_linear", streams={"input": LatentTokens()}, returns=("input",)),),
    attention_heads=PythonFunction(_heads),
    text_width=PythonFunction(lambda model: model.cond_seq_linear.in_features),
)
