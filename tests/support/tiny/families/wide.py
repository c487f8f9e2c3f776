"""Models that are only made at their real width, which ComfyUI assumes: one block of a kind."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tests.support.tiny.families.reduced import wide_radiance
from tests.support.tiny.family import of_class

CHROMA: dict[str, Any] = {
    "in_channels": 64, "out_channels": 64, "context_in_dim": 4096, "hidden_size": 3072, "mlp_ratio": 4.0, "num_heads": 24,
    "depth": 1, "depth_single_blocks": 1, "axes_dim": [16, 56, 56], "theta": 10000, "patch_size": 2, "qkv_bias": True,
    "in_dim": 64, "out_dim": 3072, "hidden_dim": 5120, "n_layers": 5, "txt_ids_dims": [], "vec_in_dim": None,
}  # fmt: skip
Z_IMAGE: dict[str, Any] = {
    "patch_size": 2, "in_channels": 16, "dim": 3840, "n_heads": 30, "n_kv_heads": 30, "cap_feat_dim": 64, "qk_norm": True,
    "axes_dims": [32, 48, 48], "axes_lens": [1536, 512, 512], "rope_theta": 256.0, "ffn_dim_multiplier": 8.0 / 3.0,
    "z_image_modulation": True, "time_scale": 1000.0, "pad_tokens_multiple": 32,
}  # fmt: skip


def _qwen(operations: Any, blocks: int = 1) -> Any:
    return of_class("qwen_image.model.QwenImageTransformer2DModel", "meta", num_layers=blocks)(None, operations)


def _z_image(operations: Any, n_layers: int = 1) -> Any:
    return of_class("lumina.model.NextDiT", "meta", n_layers=n_layers, **Z_IMAGE)(None, operations)


WIDE: Mapping[str, Callable[..., Any]] = {
    "wide_qwen": _qwen,
    "wide_z_image": _z_image,
    "wide_radiance": lambda operations: wide_radiance(None, operations),
    "wide_chroma": lambda operations: of_class("chroma.model.Chroma", "meta", **CHROMA)(None, operations),
}
"""Functions that make each model with ComfyUI's operations."""
