"""Tiny OmniGen 2."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tests.support.tiny.families.boogu import BOOGU
from tests.support.tiny.family import HEADS, Tiny, of_class, shown

OMNIGEN2: dict[str, Any] = BOOGU | {
    "hidden_size": HEADS * 64,
    "num_layers": 2,
    "num_refiner_layers": 2,
    "text_feat_dim": 48,
    "timestep_scale": 1000.0,
}
"""Sizes in the file's metadata. ComfyUI assumes other sizes; families/conftest.py has a ComfyUI that reads these."""


TINY: Mapping[str, Tiny] = {
    "omnigen2": Tiny(
        of_class("omnigen.omnigen2.OmniGen2Transformer2DModel", **OMNIGEN2),
        (16, 9, 14),
        48,
        shown,
        metadata={"sizes": json.dumps(OMNIGEN2)},
    ),
}
