"""Tiny Wan, and the models on Wan's blocks."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from tests.support.tiny.family import HEADS, Tiny, of_class
from tests.support.tiny.models import draw

LAYERS = ("blocks.0.self_attn.q", "blocks.1.cross_attn.v", "blocks.1.ffn.2", "time_projection.1", "head.head")
"""Layers that a LoRA changes in each model on Wan's blocks."""


COMMON: Mapping[str, Any] = {"ffn_dim": 256, "text_dim": 4096, "cross_attn_norm": True}


def _wan(kind: str = "t2v", channels: int = 16, image: int = 0, heads: int = HEADS) -> Callable[[Any, Any], Any]:
    sizes: dict[str, Any] = {
        "in_dim": channels + image,
        "out_dim": channels,
        "dim": heads * 128,
        "num_heads": heads,
        "num_layers": 3,
    }
    return of_class("wan.model.WanModel", model_type=kind, **sizes, **COMMON)


def _over_wan(kind: str, module: str = "model", **sizes: Any) -> Callable[[Any, Any], Any]:
    return of_class(
        f"wan.{module}.{kind}", **{"dim": HEADS * 128, "num_heads": HEADS, "num_layers": 2, **COMMON, **sizes}
    )


def _speech(tokens: int) -> Mapping[str, Any]:
    """Return the input of HuMo besides every text: the sound of three frames."""
    return {"audio_embed": draw(1, 3, 8, 5, 1280, seed=tokens)}


TINY: Mapping[str, Tiny] = {
    "wan": Tiny(_wan(), (16, 3, 8, 10), 4096),
    "wan_i2v": Tiny(_wan("i2v", image=20), (16, 3, 8, 10), 4096),
    "wan_talk": Tiny(_wan("i2v", image=20, heads=5), (16, 3, 8, 10), 4096),
    "wan22_5b": Tiny(_wan(channels=48), (48, 3, 8, 10), 4096),
    "scail": Tiny(_over_wan("SCAILWanModel"), (16, 3, 8, 10), 4096),
    "scail2": Tiny(_over_wan("SCAIL2WanModel"), (16, 3, 8, 10), 4096),
    "fun_control": Tiny(_wan("i2v", image=32), (16, 3, 8, 10), 4096),
    "s2v": Tiny(_over_wan("WanModel_S2V"), (16, 3, 8, 10), 4096),
    "dancer": Tiny(_over_wan("WanDancerModel", "model_wandancer", in_dim=36), (16, 3, 8, 12), 4096),
    "vace": Tiny(_over_wan("VaceWanModel", num_layers=4, vace_layers=2, vace_in_dim=96), (16, 3, 8, 10), 4096),
    "flow_rvs": Tiny(
        _wan(), (16, 3, 8, 10), 4096, metadata={"config": json.dumps({"transformer": {"model_type": "flow_rvs"}})}
    ),
    "wan_animate2": Tiny(  # only in newer ComfyUI versions
        _over_wan("WanAnimate2Model", "model_animate2", in_dim=36),
        (16, 4, 8, 10),
        4096,
        metadata={"config": json.dumps({"transformer": {"model_type": "animate2"}})},
    ),
    "camera": Tiny(
        _over_wan("CameraWanModel", model_type="camera", in_dim=32, in_dim_control_adapter=24), (16, 3, 8, 10), 4096
    ),
    "camera22": Tiny(
        _over_wan("CameraWanModel", model_type="camera_2.2", in_dim=36, in_dim_control_adapter=24), (16, 3, 8, 10), 4096
    ),
    "humo": Tiny(_over_wan("HumoWanModel"), (16, 3, 8, 10), 4096, _speech),
    "humo_17b": Tiny(_over_wan("HumoWanModel", in_dim=36), (16, 3, 8, 10), 4096, _speech),
    "animate": Tiny(_over_wan("AnimateWanModel", "model_animate", in_dim=36, num_layers=5), (16, 3, 8, 10), 4096),
}
