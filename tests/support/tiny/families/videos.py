"""Other models for videos: Kandinsky 5 and Mochi."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tests.support.tiny.family import HEADS, Tiny, layer_settings, of_class, padded

KANDINSKY: Mapping[str, Any] = {"time_dim": 64, "ff_dim": 256, "num_text_blocks": 1}


MOCHI: dict[str, Any] = {
    "hidden_size_x": HEADS * 32,
    "hidden_size_y": 48,
    "depth": 3,
    "num_heads": HEADS,
    "mlp_ratio_x": 128.0,  # its class insists on the width inside its feed-forward layers
    "mlp_ratio_y": 2.0,
}


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
    "kandinsky": Tiny(
        of_class("kandinsky5.model.Kandinsky5", model_dim=HEADS * 64, num_visual_blocks=3, **KANDINSKY),
        (16, 3, 8, 10),
        3584,
        pooled=768,
    ),
    "kandinsky_image": Tiny(
        of_class(
            "kandinsky5.model.Kandinsky5",
            "meta",
            model_dim=2560,
            visual_embed_dim=64,
            num_visual_blocks=2,
            axes_dims=(32, 48, 48),
            rope_scale_factor=(1.0, 1.0, 1.0),
            **KANDINSKY,
        ),
        (16, 10, 14),
        3584,
        pooled=768,
    ),
}
