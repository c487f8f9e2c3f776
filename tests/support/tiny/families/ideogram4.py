"""Tiny Ideogram 4."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tests.support.tiny.family import HEADS, Tiny, of_class

IDEOGRAM: dict[str, Any] = {
    "num_attention_heads": HEADS,
    "attention_head_dim": 32,
    "intermediate_size": 128,
    "adaln_dim": 32,
    "llm_features_dim": 48,
    "mrope_section": [6, 5, 5],
}
"""Sizes in the file's metadata. ComfyUI assumes other sizes; families/conftest.py has a ComfyUI that reads these."""


TINY: Mapping[str, Tiny] = {
    "ideogram": Tiny(
        of_class("ideogram4.model.Ideogram4Transformer2DModel", num_layers=3, **IDEOGRAM),
        (128, 5, 7),
        48,
        metadata={"sizes": json.dumps(IDEOGRAM)},
    ),
    "wide_ideogram": Tiny(
        of_class("ideogram4.model.Ideogram4Transformer2DModel", "meta", num_layers=1), (128, 5, 7), 53248
    ),
}
