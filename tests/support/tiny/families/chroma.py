"""Tiny Chroma and Chroma Radiance."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch

from tests.support.tiny.family import HEADS, Tiny, layer_settings


def wide_radiance(operations: Any) -> Any:
    sizes = {"hidden_dim": 5120, "n_layers": 5, "out_dim": 3072}
    return _radiance(24, sizes, layer_settings(operations, "meta"))


def _radiance(heads: int, sizes: Mapping[str, int], settings: Mapping[str, Any]) -> Any:
    from comfy.ldm.chroma_radiance.model import ChromaRadiance

    return ChromaRadiance(
        in_channels=3, out_channels=3, context_in_dim=64, hidden_size=heads * 128, mlp_ratio=4.0, num_heads=heads, depth=1,
        depth_single_blocks=1, axes_dim=[16, 56, 56], theta=10000, patch_size=16, qkv_bias=True, in_dim=64, txt_ids_dims=[],
        vec_in_dim=None, nerf_hidden_size=64, nerf_mlp_ratio=4, nerf_depth=4, nerf_max_freqs=8, nerf_tile_size=512,
        nerf_final_head_type="conv", nerf_embedder_dtype=torch.float32, use_x0=False, use_sequential_txt_ids=False,
        **sizes, **settings,
    )  # fmt: skip


def wide_chroma(operations: Any) -> Any:
    from comfy.ldm.chroma.model import Chroma

    return Chroma(
        in_channels=64, out_channels=64, context_in_dim=4096, hidden_size=3072, mlp_ratio=4.0, num_heads=24, depth=1,
        depth_single_blocks=1, axes_dim=[16, 56, 56], theta=10000, patch_size=2, qkv_bias=True, in_dim=64, out_dim=3072,
        hidden_dim=5120, n_layers=5, txt_ids_dims=[], vec_in_dim=None, **layer_settings(operations, "meta"),
    )  # fmt: skip


RADIANCE: dict[str, Any] = {"hidden_dim": 64, "n_layers": 1, "out_dim": HEADS * 128}


TINY: Mapping[str, Tiny] = {
    "radiance": Tiny(
        lambda _, operations: _radiance(HEADS, RADIANCE, layer_settings(operations)),
        (3, 80, 112),
        64,
        metadata={"sizes": json.dumps(RADIANCE)},
    ),
    "wide_radiance": Tiny(lambda _, operations: wide_radiance(operations), (3, 80, 112), 64),
}
