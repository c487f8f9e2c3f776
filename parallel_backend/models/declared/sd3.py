"""Stable Diffusion 3 and 3.5: blocks of text and picture. In 3.5 medium, the picture also attends to itself alone."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from ...declaration import (
    Attention,
    BlockGroup,
    Declaration,
    DistributedAttention,
    FirstPatchTokens,
    LatentTokens,
    PythonFunction,
    Replicated,
)


def _attentions(block: nn.Module) -> Sequence[Attention]:
    """Return a block's attentions: over text and picture together, and in some blocks also over the picture alone."""
    alone = block.x_block.x_block_self_attn  # type: ignore[union-attr]
    return (DistributedAttention(("context", "x")), *([DistributedAttention(("x",))] if alone else []))


SD3 = Declaration(
    groups=(
        BlockGroup(
            "joint_blocks",
            streams={"context": FirstPatchTokens(), "x": LatentTokens()},
            arguments={"c": Replicated(), "use_checkpoint": Replicated()},
            attentions=PythonFunction(_attentions),
            modulations=("context_block.adaLN_modulation", "x_block.adaLN_modulation"),
            returns=("context", "x"),
        ),
    ),
    output_layers=(
        BlockGroup("final_layer", streams={"x": LatentTokens()}, arguments={"c": Replicated()}, returns=("x",)),
    ),
    attention_heads=PythonFunction(lambda model: (model.num_heads, model.hidden_size // model.num_heads)),
    text_width=PythonFunction(lambda model: model.context_embedder.in_features),
    control={"output": "joint_blocks"},
)
