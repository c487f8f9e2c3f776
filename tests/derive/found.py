"""A derived declaration for tests that keep, send and show one."""

from __future__ import annotations

import torch
from torch import Tensor

from parallel_backend import declaration as d
from parallel_backend.conditioning import Conditioning
from parallel_backend.derive.call_kind import CallKind, kind_of
from parallel_backend.diffusion import Value
from tests.support.tiny.models import draw

FOUND = d.Declaration(
    groups=(
        d.BlockGroup(
            "blocks",
            streams={"x": d.LatentTokens(start=d.AlignedToEnd(32)), "context": d.FirstPatchTokens()},
            returns=("x", "context"),
            arguments={
                "pe": d.PerToken(("x", "context"), dim=2),
                "runs": d.TokenRanges("x"),
                "edge": d.TokenPosition("x"),
                "e": d.PerFrame("x", 4),
                "mask": d.TextMask("context", before=("x",)),
                "length": d.TextLength("context"),
                "vec": d.Replicated((1, 2)),
                "clip": d.ReplicatedContext(),
                "sound": d.PerFramePart("x", values_per_part=16, with_references=True),
            },
            attentions=d.AttentionsBySubmodule(
                "cross",
                (d.DistributedAttention(("x", "context"), kv_heads=2), d.ReplicatedKeys()),
                (d.DistributedAttention(("x",)),),
            ),
            attention_module="comfy.ldm.some.model",
            kernels=43,
            active_weights=0.4286,
            activation_copies=12.67,
        ),
        d.BlockGroup(
            "tail",
            streams={
                "x": d.LatentTokens(
                    grid=True,
                    dim=2,
                    start=d.StartAt(3),
                    parts_per_frame=8,
                    trailing=d.TokensOfLatents(("references", "pose"), (1, 2, 2)),
                )
            },
            returns=("x",),
        ),
    ),
    between=(d.BlockGroup("injector", streams={"x": d.LatentTokens()}, returns=("x",)),),
    units=d.InterleavedBlocks("blocks", "tail", (0, 5)),
    output_layers=(d.BlockGroup("head", streams={"x": d.LatentTokens()}, returns=("x",)),),
    attention_heads=d.Constant((24, 128)),
    text_width=d.Constant(4096),
    patch_size=d.Constant((1, 2, 2)),
    joint_text=False,
    divisible_latent=True,
    whole_picture=True,
    references=frozenset({"ref_latents", "pose"}),
)
"""A declaration with every kind of data that a derived one can have."""


def kind(text: int = 7, size: int = 8, frames: int = 3, /, **more: Tensor | Value) -> CallKind:
    tensors = {"context": draw(1, text, 16, seed=1), "mask": torch.ones(1, text)}
    values: dict[str, Value] = {"tokens": text, "scale": 1.5, "mode": "plain", "flag": False}
    for name, value in more.items():
        if isinstance(value, Tensor):
            tensors[name] = value
        elif value is None:
            tensors.pop(name, None)
            values.pop(name, None)
        else:
            values[name] = value
    return kind_of(draw(1, 4, frames, size, size, seed=2), Conditioning(tensors, values))
