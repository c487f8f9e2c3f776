"""Kandinsky 5: blocks of the video or picture with cross-attention to text. The text's own blocks run on every rank.

The output layer needs frames, rows and columns, so the tokens are gathered before it.
"""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from ...declaration import (
    REMOVE,
    BlockGroup,
    Declaration,
    DistributedAttention,
    LatentTokens,
    PerToken,
    PythonFunction,
    Replicated,
    ReplicatedContext,
    ReplicatedKeys,
)


def _heads(model: Any) -> tuple[int, int]:
    attention = model.visual_transformer_blocks[0].self_attention
    return attention.num_heads, attention.head_dim


KANDINSKY5 = Declaration(
    groups=(
        BlockGroup(
            "visual_transformer_blocks",
            streams={"visual_embed": LatentTokens()},
            arguments={
                "text_embed": ReplicatedContext(),
                "time_embed": Replicated(),
                "freqs": PerToken(("visual_embed",), dim=1),
            },
            attentions=(DistributedAttention(("visual_embed",)), ReplicatedKeys()),
            modulations=("visual_modulation",),
            returns=("visual_embed",),
        ),
    ),
    output_layers=(),
    attention_heads=PythonFunction(_heads),
    text_width=PythonFunction(lambda model: model.text_embeddings.in_layer.in_features),
    joint_text=False,
    positions=("rope_embedder_3d", "rope_embedder_1d"),
    divisible_latent=True,  # ComfyUI's class pads the latent and does not crop the output
    per_frame_conditioning=frozenset({"time_dim_replace"}),
)
KANDINSKY5_IMAGE = replace(
    KANDINSKY5,
    patch_size=PythonFunction(lambda model: model.patch_size[1:]),
    per_frame_conditioning=frozenset(),
    unsupported_conditioning={"time_dim_replace": REMOVE},  # ComfyUI writes it into the latent
)
