"""MiniMax-H3: one sequence without a batch dimension: text, keyframes, reference pictures and sounds, sound, video."""

from __future__ import annotations

import inspect

from ...declaration import (
    AlignedToEnd,
    BlockGroup,
    Declaration,
    DistributedAttention,
    InjectedAttention,
    LatentTokens,
    PerToken,
    PythonFunction,
    Replicated,
    TokenRanges,
)

SEQUENCE = LatentTokens(AlignedToEnd(), dim=0)

SPARSE = InjectedAttention("attn", "x", ("qkv_proj", "to_gate_compress"), "out_proj", ("head_dim", "q_norm", "k_norm"))
"""The attention that the node BlockSparseAttention injects into blocks, from ComfyUI 0.36 on."""

MINIMAX_H3 = Declaration(
    groups=(
        BlockGroup(
            "blocks",
            streams={"x": SEQUENCE},
            arguments={
                "t_emb": Replicated(vectors=()),
                "mod_segments": TokenRanges("x"),
                "rope_freqs": PerToken(("x",), dim=1),
                "attention": SPARSE,
            },
            attentions=(DistributedAttention(("x",)),),
            returns=("x",),
        ),
    ),
    output_layers=tuple(
        BlockGroup(f"final_layer.{name}", streams={"input": SEQUENCE}, returns=("input",))
        for name in ("norm", "video_out", "audio_out")
    ),
    attention_heads=PythonFunction(lambda model: (model.blocks[0].attn.heads, model.blocks[0].attn.head_dim)),
    text_width=PythonFunction(lambda model: model.condition_proj.in_features),
    patch_size=PythonFunction(lambda model: model.patch_size),
    sound=lambda model: (model.audio_latents_dim, 2, None),
    sound_optional=False,
    channels=lambda model: model.latents_dim,
    no_batches=True,
    sigmas=lambda model: "sample_sigmas" in inspect.signature(model.final_layer.forward).parameters,
)
