"""Tiny LTX-Video, LTX-2 and LTX-2.3."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tests.support.tiny.family import HEADS, Tiny, of_class, padded

LTXV: dict[str, Any] = {
    "num_attention_heads": HEADS,
    "attention_head_dim": 32,
    "cross_attention_dim": HEADS * 32,
    "caption_channels": 48,
    "num_layers": 2,
    "causal_temporal_positioning": True,
}
"""Sizes in the metadata of a file of LTX-Video."""


LTXAV = {
    "num_attention_heads": 32,
    "attention_head_dim": 4,
    "cross_attention_dim": 128,
    "audio_num_attention_heads": 3,
    "audio_attention_head_dim": 32,
    "audio_cross_attention_dim": 96,
    "caption_channels": 48,
    "connector_num_layers": 1,
    "connector_attention_head_dim": 16,
    "connector_num_attention_heads": 3,
    "audio_connector_num_attention_heads": 3,
}
"""Sizes in the metadata of a file of LTX-2."""


LTXAV23 = LTXAV | {
    "cross_attention_adaln": True,
    "apply_gated_attention": True,
    "connector_apply_gated_attention": True,
    "caption_proj_before_connector": True,
    "caption_projection_first_linear": False,
    "rope_type": "split",
    "use_middle_indices_grid": True,
    "connector_attention_head_dim": 32,
    "connector_num_attention_heads": 4,
}
"""Sizes in the metadata of a file of LTX-2.3. Its text joins the widths of the video's text and of the sound's."""


def _ltxav(config: Mapping[str, Any], text: int) -> Tiny:
    make = of_class("lightricks.av_model.LTXAVModel", num_layers=2, **config)
    return Tiny(make, (), text, metadata={"config": json.dumps({"transformer": config})})


TINY: Mapping[str, Tiny] = {
    "ltxav": _ltxav(LTXAV, 48),
    "ltxav23": _ltxav(LTXAV23, 128 + 96),
    "ltxv": Tiny(
        of_class("lightricks.model.LTXVModel", **LTXV),
        (128, 3, 4, 5),
        48,
        padded,
        metadata={"config": json.dumps({"transformer": LTXV})},
    ),
}
