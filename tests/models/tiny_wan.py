"""ComfyUI's classes over Wan with random weights, and one call of each; see tiny_classes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from tests.models.tiny_classes import HEADS, SETTINGS, TEXT, WIDTH, Case, case, text
from tests.tiny_models import draw

# isort: split
from comfy.ldm.wan.model import HumoWanModel, SCAIL2WanModel, SCAILWanModel, WanModel, WanModel_S2V
from comfy.ldm.wan.model_animate import AnimateWanModel, ConvLayer, EqualConv2d
from comfy.ldm.wan.model_wandancer import WanDancerModel

SIZES: dict[str, Any] = {
    "dim": WIDTH, "ffn_dim": 256, "text_dim": TEXT, "num_heads": HEADS, "num_layers": 3,
}  # fmt: skip


def _references(given: Mapping[str, Any]) -> Case:
    model = WanModel(in_dim=16, **SIZES | SETTINGS)
    return case("WAN21_T2V", model, draw(1, 16, 3, 7, 10, seed=1), {"context": text(), **given})


def _scail(kind: str, given: Mapping[str, Any]) -> Case:
    """Poses of half the video's size."""
    model = (SCAIL2WanModel if kind == "WAN21_SCAIL2" else SCAILWanModel)(in_dim=20, **SIZES | SETTINGS)
    poses = {"pose_latents": draw(1, 20, 3, 4, 6, seed=4), "clip_fea": draw(1, 5, 1280, seed=5)}
    return case(kind, model, draw(1, 20, 3, 8, 12, seed=1), {"context": text(), **poses, **given})


def _humo(references: bool, sound: bool = True) -> Case:
    model = HumoWanModel(in_dim=16, **SIZES | SETTINGS)
    given: dict[str, Any] = {"context": text()}
    if sound:
        given["audio_embed"] = draw(1, 3, 8, 5, 1280, seed=4)
    if references:
        given["reference_latent"] = draw(1, 16, 1, 6, 10, seed=5)
    return case("WAN21_HuMo", model, draw(1, 16, 3, 6, 10, seed=1), given)


def _s2v(given: Mapping[str, Any]) -> Case:
    model = WanModel_S2V(in_dim=16, audio_dim=64, audio_inject_layers=[0, 2], **SIZES | SETTINGS)
    sound = {"audio_embed": draw(1, 25, 64, 12, seed=4)}
    return case("WAN22_S2V", model, draw(1, 16, 3, 8, 16, seed=1), {"context": text(), **sound, **given})


def _dancer(fps: float) -> Case:
    model = WanDancerModel(in_dim=36, audio_inject_layers=[0, 2], **SIZES | SETTINGS)
    given = {"context": text(), "audio_embed": draw(1, 20, 35, seed=4), "fps": fps, "audio_inject_scale": 0.8}
    pictures = {"clip_fea": draw(1, 5, 1280, seed=5), "clip_fea_ref": draw(1, 5, 1280, seed=6)}
    return case("WAN22_WanDancer", model, draw(1, 36, 3, 8, 12, seed=1), {**given, **pictures})


def _animate(given: Mapping[str, Any]) -> Case:
    """With an encoder of faces of 4 x 4 pixels in the place of 512 x 512."""
    model = AnimateWanModel(in_dim=36, **{**SIZES, "num_layers": 5} | SETTINGS)
    kind = {"dtype": torch.float32, "device": SETTINGS["device"], "operations": SETTINGS["operations"]}
    model.motion_encoder.enc.net_app.convs = nn.ModuleList(
        [ConvLayer(3, 32, 1, **kind), EqualConv2d(32, 512, 4, bias=False, **kind)]
    )
    pose = {"pose_latents": draw(1, 16, 2, 6, 10, seed=4), "clip_fea": draw(1, 5, 1280, seed=5)}
    return case("WAN22_Animate", model, draw(1, 36, 3, 6, 10, seed=1), {"context": text(), **pose, **given})


FACES = {"face_pixel_values": 1e7 * draw(1, 3, 8, 4, 4, seed=6)}
"""Large, as the weights of random encoders make little of them."""

WAN_CASES: Mapping[str, Callable[[], Case]] = {
    "wan, references behind": lambda: _references(
        {
            "time_dim_concat": draw(1, 16, 1, 7, 10, seed=4),
            "context_latents": [draw(1, 16, 1, 5, 6, seed=5), draw(1, 16, 2, 6, 4, seed=6)],
        }
    ),
    "scail": lambda: _scail("WAN21_SCAIL", {"reference_latent": draw(1, 20, 1, 8, 12, seed=6)}),
    "scail 2": lambda: _scail(
        "WAN21_SCAIL2",
        {
            "reference_latent": draw(1, 20, 2, 8, 12, seed=6),
            "ref_mask_latents": draw(1, 28, 5, 8, 12, seed=7),
            "sam_latents": draw(1, 28, 3, 4, 6, seed=8),
            "ref_mask_flag": False,
        },
    ),
    "humo": lambda: _humo(references=False),
    "humo, reference": lambda: _humo(references=True),
    "humo, no sound": lambda: _humo(references=True, sound=False),
    "wan s2v": lambda: _s2v({}),
    "wan s2v, reference and motion": lambda: _s2v(
        {
            "reference_latent": draw(1, 16, 1, 8, 16, seed=5),
            "reference_motion": draw(1, 16, 19, 8, 16, seed=6),
            "control_video": draw(1, 16, 3, 8, 16, seed=7),
        }
    ),
    "wan dancer": lambda: _dancer(30.0),
    "wan dancer, few frames a second": lambda: _dancer(7.5),
    "wan animate": lambda: _animate(FACES),
    "wan animate, no faces": lambda: _animate({}),
}
