"""Tiny Cosmos Predict2 and Anima."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from tests.support.tiny.family import Tiny, of_class

COMMON: Mapping[str, Any] = {
    "max_img_h": 240, "max_img_w": 240, "max_frames": 128, "out_channels": 16, "patch_spatial": 2, "patch_temporal": 1,
    "model_channels": 256, "pos_emb_cls": "rope3d", "use_adaln_lora": True, "adaln_lora_dim": 256,
}  # fmt: skip


def _cosmos(channels: int) -> Callable[[Any, Any], Any]:
    """Return a maker of a Cosmos with ten blocks and sixteen heads, as ComfyUI assumes for an unknown width."""
    settings: dict[str, Any] = {"in_channels": channels, "pos_emb_learnable": True, "min_fps": 1, "max_fps": 30}
    return of_class("cosmos.predict2.MiniTrainDIT", **COMMON, **settings)


def _words(tokens: int) -> Mapping[str, Any]:
    """Return the inputs that Anima's adapter uses in place of the text: token ids of another vocabulary, and their weights."""
    return {"t5xxl_ids": torch.arange(tokens) + 5, "t5xxl_weights": torch.linspace(0.5, 1.5, tokens)}


TINY: Mapping[str, Tiny] = {
    "cosmos": Tiny(_cosmos(16), (16, 1, 8, 10), 1024),
    "cosmos_i2v": Tiny(_cosmos(17), (16, 3, 8, 10), 1024),
    # only the text adapter has its real width
    "anima": Tiny(of_class("anima.model.Anima", "meta", in_channels=16, **COMMON), (16, 1, 9, 14), 1024, _words),
}
