"""A derived declaration for tests that keep, send and show one."""

from __future__ import annotations

import torch
from torch import Tensor

from parallel_backend.conditioning import Conditioning
from parallel_backend.declaration import (
    AlignedToEnd,
    AttentionsBySubmodule,
    BlockGroup,
    Constant,
    Declaration,
    DistributedAttention,
    FirstPatchTokens,
    InterleavedBlocks,
    LatentTokens,
    PerFrame,
    PerFramePart,
    PerToken,
    Replicated,
    ReplicatedContext,
    ReplicatedKeys,
    StartAt,
    TextLength,
    TextMask,
    TokenPosition,
    TokenRanges,
    TokensOfLatents,
)
from parallel_backend.derive.call_kind import CallKind, kind_of
from parallel_backend.diffusion import Value
from tests.support.tiny.models import draw

FOUND = Declaration(
    groups=(
        BlockGroup(
            "blocks",
            streams={"x": LatentTokens(start=AlignedToEnd(32)), "context": FirstPatchTokens()},
            returns=("x", "context"),
            arguments={
                "pe": PerToken(("x", "context"), dim=2),
                "runs": TokenRanges("x"),
                "edge": TokenPosition("x"),
                "e": PerFrame("x", 4),
                "mask": TextMask("context", before=("x",)),
                "length": TextLength("context"),
                "vec": Replicated((1, 2)),
                "clip": ReplicatedContext(),
                "sound": PerFramePart("x", values_per_part=16, with_references=True),
            },
            attentions=AttentionsBySubmodule(
                "cross",
                (DistributedAttention(("x", "context"), kv_heads=2), ReplicatedKeys()),
                (DistributedAttention(("x",)),),
            ),
            attention_module="comfy.ldm.some.model",
            kernels=43,
            active_weights=0.4286,
            activation_copies=12.67,
        ),
        BlockGroup(
            "tail",
            streams={
                "x": LatentTokens(
                    grid=True,
                    dim=2,
                    start=StartAt(3),
                    parts_per_frame=8,
                    trailing=TokensOfLatents(("references", "pose"), (1, 2, 2)),
                )
            },
            returns=("x",),
        ),
    ),
    between=(BlockGroup("injector", streams={"x": LatentTokens()}, returns=("x",)),),
    units=InterleavedBlocks("blocks", "tail", (0, 5)),
    output_layers=(BlockGroup("head", streams={"x": LatentTokens()}, returns=("x",)),),
    attention_heads=Constant((24, 128)),
    text_width=Constant(4096),
    patch_size=Constant((1, 2, 2)),
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
