"""Wan Animate 2: a second run of tokens, of the video whose motion is taken, goes through the same blocks beside the first.

Each frame of the video attends to the pose of its own time too, in a loop over frames, which runs for all tokens of a rank's
heads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec.structs import replace
from torch import nn

from ..spread.declaration import (
    Along,
    Argument,
    Attended,
    Attention,
    Beside,
    ByFrame,
    ByHeads,
    Group,
    Local,
    Pictured,
    PythonFunction,
    Same,
    Spread,
)
from .wan import HEAD, WAN

VIDEO = Pictured()
OF_FRAMES = ByHeads(
    "self_attn", method="forward_gen", projects="qkv", out="o", stream="x", keys=("k_pose", "v_pose"), scratch="buffers"
)


def _with_text(block: nn.Module, itself: Attention) -> Sequence[Attention]:
    """With itself, with the first frame's features where the model takes such, with the text."""
    return itself, *[Local("x")] * (2 if hasattr(block.cross_attn, "k_img") else 1)


def _video(block: nn.Module) -> Sequence[Attention]:
    return _with_text(block, OF_FRAMES)


def _poses(block: nn.Module) -> Sequence[Attention]:
    return _with_text(block, Spread(("x",)))


GIVEN: Mapping[str, Argument] = {
    "e": ByFrame("x", dims=4),
    "freqs": Along(("x",), dim=1),
    "context": Attended(),
    "context_img_len": Same(),
}
POSES = Group(
    "blocks",
    method="forward_pose",
    streams={"x": Beside()},
    arguments=GIVEN,
    attentions=PythonFunction(_poses),
    returns=("x", "x", "x"),
)
KEPT = Group(
    "blocks",
    method="kv_from_input",
    streams={"x_pose": Beside()},
    arguments={"e": ByFrame("x_pose", dims=4), "freqs": Along(("x_pose",), dim=1)},
    returns=("x_pose", "x_pose"),
)
"""Where WanAnimate2Cache has kept what goes into a block."""

BLOCKS = Group(
    "blocks",
    method="forward_gen",
    also=(POSES, KEPT),
    streams={"x": VIDEO, "k_pose": Beside(), "v_pose": Beside()},
    arguments={**GIVEN, "f_gen": Same(), "hw": Same(), "ref_strength": Same(), "buffers": Attended()},
    attentions=PythonFunction(_video),
    returns=("x",),
)

WAN_ANIMATE_2 = replace(
    WAN,
    groups=(BLOCKS,),
    heads=(replace(HEAD, streams={"x": VIDEO}),),
    references=frozenset({"pose_latents"}),
    frames=frozenset({"pose_latents"}),
    sized={},
    whole_picture=True,
)
