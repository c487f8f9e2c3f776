"""Models with Wan's blocks in which each frame attends to its own sound, music or faces."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace
from torch import nn

from ...declaration import (
    Argument,
    Attention,
    BlockGroup,
    LatentTokens,
    PerFramePart,
    PythonFunction,
    Replicated,
    ReplicatedKeys,
    TokenPosition,
    TokensOfLatents,
)
from .wan import BLOCKS, HEAD, LAST, STEP, TRAILING_LATENTS, WAN, attentions

FRAMES = LatentTokens(LAST, parts_per_frame=1, trailing=TokensOfLatents((*TRAILING_LATENTS, "reference_latent"), STEP))
"""A video with sound or faces for each frame. References follow the video's tokens."""


def _with_sound(block: nn.Module) -> Sequence[Attention]:
    return *attentions(block), ReplicatedKeys("audio")


WAN_HUMO = replace(
    WAN,
    groups=(
        replace(
            BLOCKS,
            streams={"x": FRAMES},
            arguments={**BLOCKS.arguments, "audio": PerFramePart("x", values_per_part=16, with_references=True)},
            attentions=PythonFunction(_with_sound),
        ),
    ),
)


def _injector(path: str, stream: LatentTokens) -> BlockGroup:
    """Return the block group of the module that adds sound to the video's tokens after some blocks."""
    arguments: dict[str, Argument] = {
        "block_id": Replicated(),
        "audio_emb": PerFramePart("x"),
        "audio_emb_global": PerFramePart("x"),
        "seq_len": TokenPosition("x"),
        "scale": Replicated(),
    }
    return BlockGroup(path, streams={"x": stream}, arguments=arguments, returns=("x",))


FIRST = LatentTokens(parts_per_frame=1)
WAN_S2V = replace(
    WAN,
    groups=(replace(BLOCKS, streams={"x": FIRST}),),
    between=(_injector("audio_injector", FIRST),),
    per_token_conditioning={**WAN.per_token_conditioning, "control_video": (1, 1, 1)},
)

EIGHTHS = LatentTokens(LAST, parts_per_frame=8, trailing=TokensOfLatents(TRAILING_LATENTS, STEP))
"""A video whose frames have eight parts, each with its own moment of music."""

WAN_DANCER = replace(
    WAN,
    groups=(replace(BLOCKS, streams={"x": EIGHTHS}),),
    output_layers=(HEAD, replace(HEAD, path="head_global")),
    between=(_injector("music_injector", EIGHTHS),),
)
WHOLE_FRAMES = LatentTokens(LAST, parts_per_frame=1, trailing=TokensOfLatents(TRAILING_LATENTS, STEP))
WAN_ANIMATE = replace(
    WAN,
    per_frame_conditioning=WAN.per_frame_conditioning | {"pose_latents"},
    groups=(replace(BLOCKS, streams={"x": WHOLE_FRAMES}),),
    between=(
        BlockGroup(
            "face_adapter.fuser_blocks",
            streams={"x": WHOLE_FRAMES},
            arguments={"motion_vec": PerFramePart("x")},
            returns=("x",),
        ),
    ),
)
