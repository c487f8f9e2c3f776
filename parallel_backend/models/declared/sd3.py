"""Stable Diffusion 3 and 3.5: blocks of text and picture; in 3.5 medium the picture attends to itself besides."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from ..spread.declaration import Attention, Beside, Declaration, Group, Pictured, PythonFunction, Same, Spread


def _attentions(block: nn.Module) -> Sequence[Attention]:
    """Text and picture together, then, in some blocks, the picture alone."""
    alone = block.x_block.x_block_self_attn  # type: ignore[union-attr]
    return (Spread(("context", "x")), *([Spread(("x",))] if alone else []))


SD3 = Declaration(
    groups=(
        Group(
            "joint_blocks",
            streams={"context": Beside(), "x": Pictured()},
            arguments={"c": Same(), "use_checkpoint": Same()},
            attentions=PythonFunction(_attentions),
            modulations=("context_block.adaLN_modulation", "x_block.adaLN_modulation"),
            returns=("context", "x"),
        ),
    ),
    heads=(Group("final_layer", streams={"x": Pictured()}, arguments={"c": Same()}, returns=("x",)),),
    heads_of=PythonFunction(lambda model: (model.num_heads, model.hidden_size // model.num_heads)),
    text_width=PythonFunction(lambda model: model.context_embedder.in_features),
    control={"output": "joint_blocks"},
)
