"""Tiny Qwen-Image, and Qwen-Image 2.1 of newer ComfyUI versions."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tests.support.tiny.family import HEADS, Tiny, layer_settings, of_class


def wide_qwen(operations: Any, blocks: int = 1) -> Any:
    from comfy.ldm.qwen_image.model import QwenImageTransformer2DModel

    return QwenImageTransformer2DModel(num_layers=blocks, **layer_settings(operations, "meta"))


QWEN_IMAGE21: dict[str, Any] = {"num_attention_heads": HEADS, "attention_head_dim": 32, "axes_dims_rope": (8, 12, 12)}
"""Small sizes in the file's metadata. ComfyUI's detection assumes the real sizes; a copy of ComfyUI reads these instead."""


TINY: Mapping[str, Tiny] = {
    "qwen_image21": Tiny(
        of_class(
            "qwen_image21.model.QwenImage21Transformer2DModel",
            in_channels=64,
            out_channels=64,
            num_layers=3,
            context_in_dim=48,
            **QWEN_IMAGE21,
        ),
        (64, 7, 10),
        48,
        metadata={"sizes": json.dumps(QWEN_IMAGE21)},
    ),
}
