"""Tiny AuraFlow."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tests.support.tiny.family import HEADS, Tiny, of_class

AURAFLOW: dict[str, Any] = {"dim": HEADS * 32, "n_heads": HEADS, "global_conddim": 64}
"""Sizes in the file's metadata. ComfyUI assumes other sizes; families/conftest.py has a ComfyUI that reads these."""


TINY: Mapping[str, Tiny] = {
    "auraflow": Tiny(
        of_class("aura.mmdit.MMDiT", n_layers=4, n_double_layers=2, max_seq=64, **AURAFLOW),
        (4, 9, 14),
        2048,
        metadata={"sizes": json.dumps(AURAFLOW)},
    ),
    "wide_auraflow": Tiny(
        of_class("aura.mmdit.MMDiT", "meta", n_layers=2, n_double_layers=1, max_seq=64), (4, 9, 14), 2048
    ),
}
