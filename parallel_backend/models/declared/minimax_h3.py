"""MiniMax-H3: text, what is shown beforehand, sound and video in one sequence without a batch."""

from __future__ import annotations

import inspect

from ..spread.declaration import (
    Along,
    Declaration,
    Group,
    Handed,
    LengthLess,
    Pictured,
    PythonFunction,
    Same,
    Segments,
    Spread,
)

SEQUENCE = Pictured(LengthLess(1), dim=0)

SPARSE = Handed("attn", "x", ("qkv_proj", "to_gate_compress"), "out_proj", ("head_dim", "q_norm", "k_norm"))
"""What BlockSparseAttention hands to blocks, from ComfyUI 0.36 on."""

MINIMAX_H3 = Declaration(
    groups=(
        Group(
            "blocks",
            streams={"x": SEQUENCE},
            arguments={
                "t_emb": Same(rows=()),
                "mod_segments": Segments("x"),
                "rope_freqs": Along(("x",), dim=1),
                "attention": SPARSE,
            },
            attentions=(Spread(("x",)),),
            returns=("x",),
        ),
    ),
    heads=tuple(
        Group(f"final_layer.{name}", streams={"input": SEQUENCE}, returns=("input",))
        for name in ("norm", "video_out", "audio_out")
    ),
    heads_of=PythonFunction(lambda model: (model.blocks[0].attn.heads, model.blocks[0].attn.head_dim)),
    text_width=PythonFunction(lambda model: model.condition_proj.in_features),
    patch_size=PythonFunction(lambda model: model.patch_size),
    sound=lambda model: (model.audio_latents_dim, 2, None),
    silent=False,
    channels=lambda model: model.latents_dim,
    one_at_a_time=True,
    sigmas=lambda model: "sample_sigmas" in inspect.signature(model.final_layer.forward).parameters,
)
