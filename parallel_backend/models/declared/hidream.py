"""HiDream-I1: double blocks of picture and text, single blocks of both behind each other.

Each block gets text of its own, which is cut off again behind it.
"""

from __future__ import annotations

from ..spread.declaration import Along, Beside, Declaration, Group, Pictured, PythonFunction, Same, Spread

HIDREAM = Declaration(
    groups=(
        Group(
            "double_stream_blocks",
            streams={"image_tokens": Pictured(), "text_tokens": Beside()},
            arguments={"adaln_input": Same(), "rope": Along(("image_tokens", "text_tokens"), dim=1)},
            attentions=(Spread(("image_tokens", "text_tokens")),),
            modulations=("block.adaLN_modulation",),
            returns=("image_tokens", "text_tokens"),
        ),
        Group(
            "single_stream_blocks",
            streams={"image_tokens": Pictured()},
            arguments={"adaln_input": Same(), "rope": Along(("image_tokens",), dim=1)},
            attentions=(Spread(("image_tokens",)),),
            modulations=("block.adaLN_modulation",),
            returns=("image_tokens",),
        ),
    ),
    heads=(Group("final_layer", streams={"x": Pictured()}, arguments={"vec": Same()}, returns=("x",)),),
    heads_of=PythonFunction(lambda model: (model.num_attention_heads, model.attention_head_dim)),
    text_width=PythonFunction(lambda model: model.caption_projection[-1].linear.in_features),
    beside="image_cond",
    references=frozenset({"image_cond"}),
    positions=("pe_embedder",),
)
