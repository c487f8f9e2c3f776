"""Tiny Mochi."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tests.support.tiny.family import HEADS, Tiny, layer_settings, padded

MOCHI: dict[str, Any] = {
    "hidden_size_x": HEADS * 32,
    "hidden_size_y": 48,
    "depth": 3,
    "num_heads": HEADS,
    "mlp_ratio_x": 128.0,  # the class requires this width in its feed-forward layers
    "mlp_ratio_y": 2.0,
}
"""Sizes in the file's metadata. ComfyUI assumes other sizes; families/conftest.py has a ComfyUI that reads these."""


def _mochi(_: Any, operations: Any) -> Any:
    from comfy.ldm.genmo.joint_model.asymm_models_joint import AsymmDiTJoint

    return AsymmDiTJoint(
        patch_size=2, in_channels=12, learn_sigma=False, qk_norm=True, qkv_bias=False, posenc_preserve_area=True,
        timestep_scale=1000.0, use_t5=True, **MOCHI, **layer_settings(operations),
    )  # fmt: skip


TINY: Mapping[str, Tiny] = {
    "mochi": Tiny(
        _mochi,
        (12, 3, 8, 10),
        4096,
        padded,
        metadata={"sizes": json.dumps(MOCHI)},
    ),
}
