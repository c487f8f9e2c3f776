"""ComfyUI's classes of video models with random weights, and one call of each; see tiny_classes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from comfy.ldm.hunyuan_video.model import HunyuanVideo

from tests.models.tiny_classes import HEADS, SETTINGS, TEXT, Case, case, text
from tests.tiny_models import draw


def _hunyuan(kind: str, given: Mapping[str, Any], channels: int = 16, batch: int = 1, **settings: Any) -> Case:
    sizes = {
        "in_channels": channels, "out_channels": 16, "vec_in_dim": 32, "context_in_dim": TEXT, "hidden_size": HEADS * 128,
        "mlp_ratio": 2.0, "num_heads": HEADS, "depth": 2, "depth_single_blocks": 2, "axes_dim": [16, 56, 56], "theta": 256,
        "patch_size": [1, 2, 2], "qkv_bias": True, "guidance_embed": True, "byt5": False, "meanflow": False,
        "use_cond_type_embedding": False, "vision_in_dim": None, "meanflow_sum": False,
    }  # fmt: skip
    model = HunyuanVideo(**sizes | SETTINGS | settings)
    prompt = {"context": text(batch=batch), "y": draw(batch, 32, seed=3), "guidance": torch.tensor([6.0])}
    return case(kind, model, draw(batch, channels, 3, 6, 10, seed=1), prompt | given)


MASK = torch.tensor([[1, 1, 0, 1, 1, 0, 0]])
FIFTEEN: Mapping[str, Any] = {
    "vec_in_dim": None, "patch_size": [1, 1, 1], "guidance_embed": False, "byt5": True, "use_cond_type_embedding": True,
    "vision_in_dim": 40, "meanflow_sum": True, "depth": 3, "depth_single_blocks": 0,
}  # fmt: skip

VIDEOS: Mapping[str, Callable[[], Case]] = {
    "hunyuan video": lambda: _hunyuan("HunyuanVideo", {}, batch=2),
    "hunyuan video, masked text": lambda: _hunyuan("HunyuanVideo", {"attention_mask": MASK}),
    "hunyuan video, first frame": lambda: _hunyuan("HunyuanVideoI2V", {"guiding_frame_index": torch.tensor([0.0])}, 33),
    "hunyuan video, first frame and reference": lambda: _hunyuan(
        "HunyuanVideo",
        {
            "guiding_frame_index": torch.tensor([0.0]),
            "ref_latent": draw(1, 16, 1, 6, 10, seed=4),
            "attention_mask": MASK,
        },
    ),
    "hunyuan video 1.5, glyphs and picture": lambda: _hunyuan(
        "HunyuanVideo15", {"txt_byt5": draw(1, 3, 1472, seed=4), "clip_fea": draw(1, 5, 40, seed=5)}, 33, **FIFTEEN
    ),
}
