"""Qwen-Image 2.1: one stream of text and references, which every rank holds, and the picture, whose tokens ranks divide.

No token of the text or of a reference attends to the picture, so ComfyUI caches their keys and values for a run. ComfyUI's
functions for attention and its cache run unchanged on each rank. Under PipeFusion, the cache is off, and text and references
are computed with each patch.
"""

from __future__ import annotations

from ...conditioning import PREFIX_CACHE
from ...declaration import (
    BlockGroup,
    Declaration,
    LatentTokens,
    PerToken,
    PrefixedAttention,
    PrefixedTokens,
    PythonFunction,
    Replicated,
    TokenPosition,
)

QWEN_IMAGE21 = Declaration(
    groups=(
        BlockGroup(
            "transformer_blocks",
            streams={"x": PrefixedTokens("prefix_len")},
            arguments={
                "mod": Replicated(),
                "pe": PerToken(("x",), dim=1),
                "attn_fn": Replicated(),
                "prefix_len": TokenPosition("x"),
            },
            attentions=(PrefixedAttention("x"),),
            returns=("x",),
        ),
    ),
    output_layers=(
        BlockGroup("norm_out", streams={"x": LatentTokens()}, arguments={"temb": Replicated()}, returns=("x",)),
        BlockGroup("proj_out", streams={"input": LatentTokens()}, returns=("input",)),
    ),
    attention_heads=PythonFunction(
        lambda model: (
            model.transformer_blocks[0].attn.heads,
            model.inner_dim // model.transformer_blocks[0].attn.heads,
        )
    ),
    text_width=PythonFunction(lambda model: model.txt_in.in_layer.in_features),
    patch_size=PythonFunction(lambda model: 1),
    pipefusion_options={PREFIX_CACHE: {"device": "off"}},
)
