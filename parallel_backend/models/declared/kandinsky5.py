"""Kandinsky 5: blocks of the video or picture alone, text attended to; its text's own blocks run on every rank.

Its output layer needs frames, rows and columns, so the tokens are gathered before it.
"""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from ..spread.declaration import (
    REMOVE,
    Along,
    Attended,
    Declaration,
    Group,
    Local,
    Pictured,
    PythonFunction,
    Same,
    Spread,
)


def _heads(model: Any) -> tuple[int, int]:
    attention = model.visual_transformer_blocks[0].self_attention
    return attention.num_heads, attention.head_dim


KANDINSKY5 = Declaration(
    groups=(
        Group(
            "visual_transformer_blocks",
            streams={"visual_embed": Pictured()},
            arguments={"text_embed": Attended(), "time_embed": Same(), "freqs": Along(("visual_embed",), dim=1)},
            attentions=(Spread(("visual_embed",)), Local()),
            modulations=("visual_modulation",),
            returns=("visual_embed",),
        ),
    ),
    heads=(),
    heads_of=PythonFunction(_heads),
    text_width=PythonFunction(lambda model: model.text_embeddings.in_layer.in_features),
    joint_text=False,
    positions=("rope_embedder_3d", "rope_embedder_1d"),
    divides=True,  # its class pads, and takes nothing away again
    frames=frozenset({"time_dim_replace"}),
)
KANDINSKY5_IMAGE = replace(
    KANDINSKY5,
    patch_size=PythonFunction(lambda model: model.patch_size[1:]),
    frames=frozenset(),
    refused={"time_dim_replace": REMOVE},  # ComfyUI writes it into the latent
)
