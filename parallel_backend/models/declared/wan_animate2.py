"""Wan Animate 2: tokens of a second video, which provides the motion, run through the same blocks as the video's tokens.

Each frame of the video also attends to the pose of its own time. ComfyUI does so in a loop over frames, which runs on all
tokens of a rank's heads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec.structs import replace
from torch import nn

from ...declaration import (
    Argument,
    Attention,
    BlockGroup,
    DistributedAttention,
    FirstPatchTokens,
    HeadParallelAttention,
    LatentTokens,
    PerFrame,
    PerToken,
    PythonFunction,
    Replicated,
    ReplicatedContext,
    ReplicatedKeys,
)
from .wan import HEAD, WAN

VIDEO = LatentTokens()
OF_FRAMES = HeadParallelAttention(
    "self_attn",
    method="forward_gen",
    projection="qkv",
    output_layer="o",
    stream="x",
    keys=("k_pose", "v_pose"),
    scratch="buffers",
)


def _with_text(block: nn.Module, itself: Attention) -> Sequence[Attention]:
    """Return a block's attentions: to itself, to the first frame's features if the model has them, and to the text."""
    return itself, *[ReplicatedKeys("x")] * (2 if hasattr(block.cross_attn, "k_img") else 1)


def _video(block: nn.Module) -> Sequence[Attention]:
    return _with_text(block, OF_FRAMES)


def _poses(block: nn.Module) -> Sequence[Attention]:
    return _with_text(block, DistributedAttention(("x",)))


ARGUMENTS: Mapping[str, Argument] = {
    "e": PerFrame("x", dims=4),
    "freqs": PerToken(("x",), dim=1),
    "context": ReplicatedContext(),
    "context_img_len": Replicated(),
}
POSES = BlockGroup(
    "blocks",
    method="forward_pose",
    streams={"x": FirstPatchTokens()},
    arguments=ARGUMENTS,
    attentions=PythonFunction(_poses),
    returns=("x", "x", "x"),
)
CACHED_POSES = BlockGroup(
    "blocks",
    method="kv_from_input",
    streams={"x_pose": FirstPatchTokens()},
    arguments={"e": PerFrame("x_pose", dims=4), "freqs": PerToken(("x_pose",), dim=1)},
    returns=("x_pose", "x_pose"),
)
"""The method that ComfyUI calls if WanAnimate2Cache has cached a block's input."""

BLOCKS = BlockGroup(
    "blocks",
    method="forward_gen",
    other_methods=(POSES, CACHED_POSES),
    streams={"x": VIDEO, "k_pose": FirstPatchTokens(), "v_pose": FirstPatchTokens()},
    arguments={
        **ARGUMENTS,
        "f_gen": Replicated(),
        "hw": Replicated(),
        "ref_strength": Replicated(),
        "buffers": ReplicatedContext(),
    },
    attentions=PythonFunction(_video),
    returns=("x",),
)

WAN_ANIMATE_2 = replace(
    WAN,
    groups=(BLOCKS,),
    output_layers=(replace(HEAD, streams={"x": VIDEO}),),
    references=frozenset({"pose_latents"}),
    per_frame_conditioning=frozenset({"pose_latents"}),
    per_token_conditioning={},
    whole_picture=True,
)
