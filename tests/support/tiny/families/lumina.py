"""Tiny Lumina 2 and Z-Image."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from tests.support.tiny.family import HEADS, Tiny, layer_settings


def wide_z_image(operations: Any, n_layers: int = 1) -> Any:
    from comfy.ldm.lumina.model import NextDiT

    return NextDiT(
        patch_size=2, in_channels=16, dim=3840, n_layers=n_layers, n_heads=30, n_kv_heads=30, cap_feat_dim=64, qk_norm=True,
        axes_dims=[32, 48, 48], axes_lens=[1536, 512, 512], rope_theta=256.0, ffn_dim_multiplier=8.0 / 3.0,
        z_image_modulation=True, time_scale=1000.0, pad_tokens_multiple=32, **layer_settings(operations, "meta"),
    )  # fmt: skip


def _lumina(width: int, sizes: Mapping[str, Any], device: str = "cpu") -> Callable[[Any, Any], Any]:
    def make(_: Any, operations: Any) -> Any:
        from comfy.ldm.lumina.model import NextDiT

        return NextDiT(
            patch_size=2, in_channels=16, dim=width, n_layers=2, cap_feat_dim=2304, qk_norm=True, **sizes,
            **layer_settings(operations, device),
        )  # fmt: skip

    return make


LUMINA: dict[str, Any] = {
    "n_heads": HEADS,
    "n_kv_heads": 1,
    "axes_dims": [32, 32, 32],
    "axes_lens": [300, 512, 512],
    "rope_theta": 10000.0,
    "ffn_dim_multiplier": 1.0,
}


WIDE_LUMINA = LUMINA | {"n_heads": 24, "n_kv_heads": 8, "ffn_dim_multiplier": 4.0}


TINY: Mapping[str, Tiny] = {
    "lumina": Tiny(_lumina(HEADS * 96, LUMINA), (16, 9, 14), 2304, metadata={"sizes": json.dumps(LUMINA)}),
    "wide_lumina": Tiny(_lumina(2304, WIDE_LUMINA, "meta"), (16, 9, 14), 2304),
}
