"""Models over Wan's blocks whose frames attend to sound, music or faces of their own."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace
from torch import nn

from ..spread.declaration import (
    Argument,
    Attention,
    Behind,
    Boundary,
    ByPart,
    Group,
    Local,
    Pictured,
    PythonFunction,
    Same,
)
from .wan import BEHIND, BLOCKS, HEAD, LAST, STEP, WAN, attentions

FRAMES = Pictured(LAST, parts=1, behind=Behind((*BEHIND, "reference_latent"), STEP))
"""With the sound or faces of each frame; references come behind."""


def _with_sound(block: nn.Module) -> Sequence[Attention]:
    return *attentions(block), Local("audio")


WAN_HUMO = replace(
    WAN,
    groups=(
        replace(
            BLOCKS,
            streams={"x": FRAMES},
            arguments={**BLOCKS.arguments, "audio": ByPart("x", each=16, whole=True)},
            attentions=PythonFunction(_with_sound),
        ),
    ),
)


def _injector(path: str, stream: Pictured) -> Group:
    """What adds sound to the video's tokens after some blocks."""
    arguments: dict[str, Argument] = {
        "block_id": Same(),
        "audio_emb": ByPart("x"),
        "audio_emb_global": ByPart("x"),
        "seq_len": Boundary("x"),
        "scale": Same(),
    }
    return Group(path, streams={"x": stream}, arguments=arguments, returns=("x",))


FIRST = Pictured(parts=1)
WAN_S2V = replace(
    WAN,
    groups=(replace(BLOCKS, streams={"x": FIRST}),),
    between=(_injector("audio_injector", FIRST),),
    sized={**WAN.sized, "control_video": (1, 1, 1)},
)

EIGHTHS = Pictured(LAST, parts=8, behind=Behind(BEHIND, STEP))
"""There are eight moments of music in a frame, which share out its tokens."""

WAN_DANCER = replace(
    WAN,
    groups=(replace(BLOCKS, streams={"x": EIGHTHS}),),
    heads=(HEAD, replace(HEAD, path="head_global")),
    between=(_injector("music_injector", EIGHTHS),),
)
WHOLE_FRAMES = Pictured(LAST, parts=1, behind=Behind(BEHIND, STEP))
WAN_ANIMATE = replace(
    WAN,
    frames=WAN.frames | {"pose_latents"},
    groups=(replace(BLOCKS, streams={"x": WHOLE_FRAMES}),),
    between=(
        Group(
            "face_adapter.fuser_blocks",
            streams={"x": WHOLE_FRAMES},
            arguments={"motion_vec": ByPart("x")},
            returns=("x",),
        ),
    ),
)
