"""Small models of ComfyUI's classes based on Wan, with random weights and one call of each; see case.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from ..reduced import draw
from .case import HEADS, TEXT, WIDTH, Builder, Example, Small, example, seen, text

SIZES: dict[str, Any] = {
    "dim": WIDTH, "ffn_dim": 256, "text_dim": TEXT, "num_heads": HEADS, "num_layers": 3,
}  # fmt: skip


def _references(builder: Builder, prompt: Mapping[str, Any]) -> Example:
    model = builder.model("wan.model.WanModel", in_dim=16, **SIZES)
    return example("WAN21_T2V", model, draw(1, 16, 3, 7, 10, seed=1), {"cross_attn": text(), **prompt})


def _scail(builder: Builder, kind: str, prompt: Mapping[str, Any]) -> Example:
    """Return a SCAIL model, with poses at half the video's size."""
    model = builder.model(f"wan.model.{'SCAIL2' if kind == 'WAN21_SCAIL2' else 'SCAIL'}WanModel", in_dim=20, **SIZES)
    poses = {"pose_video_latent": draw(1, 16, 3, 4, 6, seed=4), "clip_vision_output": seen(seed=5)}
    return example(kind, model, draw(1, 16, 3, 8, 12, seed=1), {"cross_attn": text(), **poses, **prompt})


def _humo(builder: Builder, references: bool, sound: bool = True, channels: int = 16) -> Example:
    model = builder.model("wan.model.HumoWanModel", in_dim=channels, **SIZES)
    prompt: dict[str, Any] = {"cross_attn": text()}
    if sound:
        prompt["audio_embed"] = draw(1, 3, 8, 5, 1280, seed=4)
    if references:
        prompt["reference_latents"] = [draw(1, 16, 1, 6, 10, seed=5)]
    return example("WAN21_HuMo", model, draw(1, 16, 3, 6, 10, seed=1), prompt)


def _s2v(builder: Builder, prompt: Mapping[str, Any]) -> Example:
    model = builder.model("wan.model.WanModel_S2V", in_dim=16, audio_dim=64, audio_inject_layers=[0, 2], **SIZES)
    sound = {"audio_embed": draw(1, 25, 64, 12, seed=4)}
    return example("WAN22_S2V", model, draw(1, 16, 3, 8, 16, seed=1), {"cross_attn": text(), **sound, **prompt})


def _dancer(builder: Builder, fps: float) -> Example:
    model = builder.model("wan.model_wandancer.WanDancerModel", in_dim=36, audio_inject_layers=[0, 2], **SIZES)
    prompt = {"cross_attn": text(), "audio_embed": draw(1, 20, 35, seed=4), "fps": fps, "audio_inject_scale": 0.8}
    pictures = {"clip_vision_output": seen(seed=5), "clip_vision_output_ref": seen(seed=6)}
    return example("WAN22_WanDancer", model, draw(1, 16, 3, 8, 12, seed=1), {**prompt, **pictures})


def _animate(builder: Builder, prompt: Mapping[str, Any]) -> Example:
    """Return a Wan Animate whose face encoder reads 4 x 4 pixels instead of 512 x 512."""
    model = builder.model("wan.model_animate.AnimateWanModel", in_dim=36, **{**SIZES, "num_layers": 5})
    model.motion_encoder.enc.net_app.convs = nn.ModuleList(
        [
            builder.model("wan.model_animate.ConvLayer", 3, 32, 1),
            builder.model("wan.model_animate.EqualConv2d", 32, 512, 4, bias=False),
        ]
    )
    pose = {"pose_video_latent": draw(1, 16, 2, 6, 10, seed=4), "clip_vision_output": seen(seed=5)}
    return example("WAN22_Animate", model, draw(1, 16, 3, 6, 10, seed=1), {"cross_attn": text(), **pose, **prompt})


def _animate_2(builder: Builder, prompt: Mapping[str, Any]) -> Example:
    model = builder.model("wan.model_animate2.WanAnimate2Model", in_dim=36, **SIZES)
    picture = {"clip_vision_output": seen(seed=5), "reference_strength": 1.5}
    return example("WAN_Animate2", model, draw(1, 16, 4, 6, 10, seed=1), {"cross_attn": text(), **picture, **prompt})


POSES = {
    "pose_video_latent": draw(1, 16, 3, 6, 10, seed=4),
    "clip_vision_output_pose": seen(seed=6),
    "cross_attn_pose": text(5),
    "pose_strength": 0.8,
}

FACES = {"face_video_pixels": 1e7 * draw(1, 3, 8, 4, 4, seed=6)}
"""Large values, because the weights of random encoders reduce them to little."""

WAN: Mapping[str, Small] = {
    "wan, references behind": lambda builder: _references(
        builder,
        {
            "time_dim_concat": draw(1, 16, 1, 7, 10, seed=4),
            "context_latents": [draw(1, 16, 1, 5, 6, seed=5), draw(1, 16, 2, 6, 4, seed=6)],
        },
    ),
    "scail": lambda builder: _scail(builder, "WAN21_SCAIL", {"reference_latents": [draw(1, 16, 1, 8, 12, seed=6)]}),
    "scail 2": lambda builder: _scail(
        builder,
        "WAN21_SCAIL2",
        {
            "reference_latents": [draw(1, 16, 1, 8, 12, seed=6), draw(1, 16, 1, 8, 12, seed=9)],
            "ref_mask_28ch": draw(1, 5, 28, 8, 12, seed=7),
            "driving_mask_28ch": draw(1, 3, 28, 4, 6, seed=8),
            "ref_mask_flag": False,
        },
    ),
    "humo": lambda builder: _humo(builder, references=False),
    "humo, reference": lambda builder: _humo(builder, references=True),
    "humo, no sound": lambda builder: _humo(builder, references=True, sound=False),
    "humo 17b, reference": lambda builder: _humo(builder, references=True, channels=36),
    "wan s2v": lambda builder: _s2v(builder, {}),
    "wan s2v, reference and motion": lambda builder: _s2v(
        builder,
        {
            "reference_latents": [draw(1, 16, 1, 8, 16, seed=5)],
            "reference_motion": draw(1, 16, 19, 8, 16, seed=6),
            "control_video": draw(1, 16, 3, 8, 16, seed=7),
        },
    ),
    "wan dancer": lambda builder: _dancer(builder, 30.0),
    "wan dancer, few frames a second": lambda builder: _dancer(builder, 7.5),
    "wan animate": lambda builder: _animate(builder, FACES),
    "wan animate 2": lambda builder: _animate_2(builder, POSES),
    "wan animate 2, no poses": lambda builder: _animate_2(builder, {}),
    "wan animate, no faces": lambda builder: _animate(builder, {}),
}
