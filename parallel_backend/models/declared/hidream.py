"""HiDream-I1: double blocks of picture and text, and single blocks of one stream, picture then text.

Each block gets text of its own, which ComfyUI cuts off again after the block.
"""

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
)

HIDREAM = Declaration(
    groups=(
        BlockGroup(
            "double_stream_blocks",
            streams={"image_tokens": LatentTokens(), "text_tokens": FirstPatchTokens()},
            arguments={"adaln_input": Replicated(), "rope": PerToken(("image_tokens", "text_tokens"), dim=1)},
            attentions=(DistributedAttention(("image_tokens", "text_tokens")),),
            modulations=("block.adaLN_modulation",),
            returns=("image_tokens", "text_tokens"),
        ),
        BlockGroup(
            "single_stream_blocks",
            streams={"image_tokens": LatentTokens()},
            arguments={"adaln_input": Replicated(), "rope": PerToken(("image_tokens",), dim=1)},
            attentions=(DistributedAttention(("image_tokens",)),),
            modulations=("block.adaLN_modulation",),
            returns=("image_tokens",),
        ),
    ),
    output_layers=(
        BlockGroup("final_layer", streams={"x": LatentTokens()}, arguments={"vec": Replicated()}, returns=("x",)),
    ),
    attention_heads=PythonFunction(lambda model: (model.num_attention_heads, model.attention_head_dim)),
    text_width=PythonFunction(lambda model: model.caption_projection[-1].linear.in_features),
    concatenated_latent="image_cond",
    references=frozenset({"image_cond"}),
    positions=("pe_embedder",),
)
