"""Qwen-Image 2.1: one stream of text and references, which every rank keeps, and of the picture, whose tokens are split.

No token of the text or of a reference attends to the picture, so ComfyUI keeps their keys and values for a run. Its functions
for attention, and its cache, run on each rank as they are. Under PipeFusion, the cache is off, and text and references are
computed with each patch.
"""

from __future__ import annotations

from ...conditioning import PREFIX_CACHE
from ..spread.declaration import (
    AfterPrefix,
    Along,
    Boundary,
    Declaration,
    Group,
    Pictured,
    Prefixed,
    PythonFunction,
    Same,
)

QWEN_IMAGE21 = Declaration(
    groups=(
        Group(
            "transformer_blocks",
            streams={"x": Prefixed("prefix_len")},
            arguments={
                "mod": Same(),
                "pe": Along(("x",), dim=1),
                "attn_fn": Same(),
                "prefix_len": Boundary("x"),
            },
            attentions=(AfterPrefix("x"),),
            returns=("x",),
        ),
    ),
    heads=(
        Group("norm_out", streams={"x": Pictured()}, arguments={"temb": Same()}, returns=("x",)),
        Group("proj_out", streams={"input": Pictured()}, returns=("input",)),
    ),
    heads_of=PythonFunction(
        lambda model: (
            model.transformer_blocks[0].attn.heads,
            model.inner_dim // model.transformer_blocks[0].attn.heads,
        )
    ),
    text_width=PythonFunction(lambda model: model.txt_in.in_layer.in_features),
    patch_size=PythonFunction(lambda model: 1),
    pipefusion_options={PREFIX_CACHE: {"device": "off"}},
)
