"""LTX-Video: blocks of the video with a timestep for each token and cross-attention to text."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...declaration import (
    AttentionBias,
    BlockGroup,
    Declaration,
    DistributedAttention,
    LatentTokens,
    PerFrame,
    PerToken,
    PythonFunction,
    Replicated,
    ReplicatedContext,
    ReplicatedKeys,
)
from ..sequence_parallel.arguments import MASKED


def _text_width(model: Any) -> int:
    """Return the width of the text: after its projection if ComfyUI projects it before the model, else before."""
    width: int = model.inner_dim if model.caption_proj_before_connector else model.caption_channels
    return width


def of_guides(mask: Any) -> Tensor:
    """Return the log weights of ComfyUI's GuideAttentionMask, `[tokens, 2]`; see `AttentionBias`.

    The mask weighs attention between the video and the guides, which are the last tokens.
    """
    logarithms = mask.noisy_mask.flatten().clamp(min=MASKED)
    video = torch.arange(len(logarithms), device=logarithms.device) < mask.guide_start
    return torch.stack((logarithms, video.to(logarithms)), dim=1)


LTXV = Declaration(
    groups=(
        BlockGroup(
            "transformer_blocks",
            streams={"x": LatentTokens()},
            arguments={
                "context": ReplicatedContext(),
                "attention_mask": ReplicatedContext(),
                "timestep": PerFrame("x", dims=3),
                "pe": PerToken(("x",), dim=1),
                "prompt_timestep": Replicated(),
                "self_attention_mask": AttentionBias("x", of_guides),
            },
            attentions=(DistributedAttention(("x",), biased=True), ReplicatedKeys()),
            returns=("x",),
        ),
    ),
    output_layers=tuple(
        BlockGroup(path, streams={"input": LatentTokens()}, returns=("input",)) for path in ("norm_out", "proj_out")
    ),
    attention_heads=PythonFunction(lambda model: (model.num_attention_heads, model.attention_head_dim)),
    text_width=PythonFunction(_text_width),
    joint_text=False,
    takes_text_mask=True,
    patch_size=PythonFunction(lambda model: model.patchifier.patch_size),
)
