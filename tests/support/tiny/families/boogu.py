"""Tiny Boogu."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tests.support.tiny.family import HEADS, ROPE, Tiny, of_class, shown

BOOGU: dict[str, Any] = {
    "num_attention_heads": 2 * HEADS,
    "num_kv_heads": HEADS,
    "multiple_of": 64,
    "axes_dim_rope": ROPE,
}
"""Sizes in the file's metadata. ComfyUI assumes other sizes; families/conftest.py has a ComfyUI that reads these."""


TINY: Mapping[str, Tiny] = {
    "boogu": Tiny(
        of_class(
            "boogu.model.BooguTransformer2DModel",
            hidden_size=HEADS * 64,
            num_layers=2,
            num_double_stream_layers=2,
            num_refiner_layers=1,
            instruction_feat_dim=48,
            **BOOGU,
        ),
        (16, 9, 14),
        48,
        shown,
        metadata={"sizes": json.dumps(BOOGU)},
    ),
}
