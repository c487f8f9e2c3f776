"""Qwen-Image."""

from __future__ import annotations

from typing import Any

from tests.support.tiny.family import layer_settings


def wide_qwen(operations: Any, blocks: int = 1) -> Any:
    from comfy.ldm.qwen_image.model import QwenImageTransformer2DModel

    return QwenImageTransformer2DModel(num_layers=blocks, **layer_settings(operations, "meta"))
