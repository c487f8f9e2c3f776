"""Tiny ERNIE-Image."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tests.support.tiny.family import HEADS, ROPE, Tiny, of_class

ERNIE: dict[str, Any] = {
    "hidden_size": HEADS * 32,
    "num_attention_heads": HEADS,
    "num_layers": 3,
    "ffn_hidden_size": 256,
    "text_in_dim": 48,
    "rope_axes_dim": ROPE,
}
"""Sizes in the file's metadata. ComfyUI assumes other sizes; families/conftest.py has a ComfyUI that reads these."""


TINY: Mapping[str, Tiny] = {
    "ernie": Tiny(
        of_class("ernie.model.ErnieImageModel", **ERNIE), (128, 5, 7), 48, metadata={"sizes": json.dumps(ERNIE)}
    ),
}
