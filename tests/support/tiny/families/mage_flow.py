"""Tiny MageFlow."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tests.support.tiny.family import HEADS, ROPE, Tiny, of_class

MAGE_FLOW: dict[str, Any] = {"num_attention_heads": HEADS, "attention_head_dim": 32, "axes_dims_rope": ROPE}
"""Sizes in the file's metadata. ComfyUI assumes other sizes; families/conftest.py has a ComfyUI that reads these."""


TINY: Mapping[str, Tiny] = {
    "mage_flow": Tiny(
        of_class("mage_flow.model.MageFlowTransformer2DModel", num_layers=3, **MAGE_FLOW),
        (128, 5, 7),
        2560,
        metadata={"sizes": json.dumps(MAGE_FLOW)},
    ),
    "wide_mage_flow": Tiny(
        of_class("mage_flow.model.MageFlowTransformer2DModel", "meta", num_layers=1), (128, 5, 7), 2560
    ),
}
