"""Tiny FLUX.2, LongCat-Image and Ovis, which use FLUX's class."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.support.tiny.family import HEADS, Tiny, layer_settings


def _flux2(_: Any, operations: Any) -> Any:
    from comfy.ldm.flux.model import Flux

    return Flux(
        in_channels=128, out_channels=128, vec_in_dim=None, context_in_dim=48, hidden_size=HEADS * 128, mlp_ratio=3.0,
        num_heads=HEADS, depth=1, depth_single_blocks=2, axes_dim=[32, 32, 32, 32], theta=2000, patch_size=1, qkv_bias=False,
        guidance_embed=True, txt_ids_dims=[3], global_modulation=True, mlp_silu_act=True, ops_bias=False,
        default_ref_method="index", ref_index_scale=10.0, **layer_settings(operations),
    )  # fmt: skip


def _longcat(_: Any, operations: Any) -> Any:
    from comfy.ldm.flux.model import Flux

    return Flux(
        in_channels=16, out_channels=16, vec_in_dim=None, context_in_dim=3584, hidden_size=HEADS * 128, mlp_ratio=4.0,
        num_heads=HEADS, depth=2, depth_single_blocks=2, axes_dim=[16, 56, 56], theta=10000, patch_size=2, qkv_bias=True,
        guidance_embed=False, txt_ids_dims=[1, 2], **layer_settings(operations),
    )  # fmt: skip


def _ovis(_: Any, operations: Any) -> Any:
    from comfy.ldm.flux.model import Flux

    return Flux(
        in_channels=16, out_channels=16, vec_in_dim=None, context_in_dim=2048, hidden_size=HEADS * 128, mlp_ratio=4.0,
        num_heads=HEADS, depth=2, depth_single_blocks=2, axes_dim=[16, 56, 56], theta=10000, patch_size=2, qkv_bias=True,
        guidance_embed=False, txt_ids_dims=[1, 2], yak_mlp=True, txt_norm=True, **layer_settings(operations),
    )  # fmt: skip


TINY: Mapping[str, Tiny] = {
    "flux2": Tiny(_flux2, (128, 7, 5), 48),
    "ovis": Tiny(_ovis, (16, 9, 14), 2048),
    "longcat": Tiny(_longcat, (16, 9, 14), 3584),
}
