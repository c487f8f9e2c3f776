"""Tiny HunyuanVideo, HunyuanImage and its refiner."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tests.support.tiny.family import HEADS, Tiny, of_class, padded

LAYERS = (
    "double_blocks.0.img_attn.qkv",
    "double_blocks.1.txt_mlp.2",
    "single_blocks.0.linear1",
    "txt_in.individual_token_refiner.blocks.0.self_attn.qkv",
    "final_layer.linear",
)
"""Layers that each model's LoRA changes."""


def _hunyuan(channels: int = 16, **sizes: Any) -> Callable[[Any, Any], Any]:
    video: dict[str, Any] = {
        "vec_in_dim": 768, "context_in_dim": 4096, "patch_size": [1, 2, 2], "axes_dim": [16, 56, 56],
        "out_channels": 16, "depth": 2, "depth_single_blocks": 2, "guidance_embed": True, "byt5": False, "meanflow": False,
        "use_cond_type_embedding": False, "vision_in_dim": None, "meanflow_sum": False, "in_channels": channels,
        "hidden_size": HEADS * 128, "mlp_ratio": 4.0, "num_heads": HEADS, "theta": 256, "qkv_bias": True,
    }  # fmt: skip
    return of_class("hunyuan_video.model.HunyuanVideo", **video | sizes)


HUNYUAN_IMAGE: Mapping[str, Any] = {
    "vec_in_dim": None, "context_in_dim": 3584, "patch_size": [1, 1], "axes_dim": [64, 64], "out_channels": 64,
    "guidance_embed": False, "byt5": True,
}  # fmt: skip
HUNYUAN15: Mapping[str, Any] = {
    "vec_in_dim": None, "context_in_dim": 48, "patch_size": [1, 1, 1], "out_channels": 32, "depth_single_blocks": 0,
    "guidance_embed": False, "byt5": True, "use_cond_type_embedding": True, "vision_in_dim": 1152, "meanflow_sum": True,
}  # fmt: skip
REFINER: Mapping[str, Any] = {
    "vec_in_dim": None, "context_in_dim": 48, "patch_size": [1, 1, 1], "out_channels": 64, "depth": 1,
    "guidance_embed": False,
}  # fmt: skip


TINY: Mapping[str, Tiny] = {
    "hunyuan": Tiny(_hunyuan(), (16, 3, 8, 10), 4096, pooled=768),
    "hunyuan_i2v": Tiny(_hunyuan(33), (16, 3, 8, 10), 4096, pooled=768),
    "skyreels": Tiny(_hunyuan(32), (16, 3, 8, 10), 4096, pooled=768),
    "hunyuan_image": Tiny(_hunyuan(64, **HUNYUAN_IMAGE), (64, 9, 7), 3584),
    "hunyuan15": Tiny(_hunyuan(65, **HUNYUAN15), (32, 3, 4, 5), 48, pooled=768),
    "meanflow": Tiny(_hunyuan(98, **{**HUNYUAN15, "meanflow": True}), (32, 3, 4, 5), 48, pooled=768),
    "refiner": Tiny(_hunyuan(128, **REFINER), (32, 1, 8, 10), 48, padded, pooled=768),
}
