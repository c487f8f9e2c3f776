"""Tiny HiDream."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tests.support.tiny.family import HEADS, Tiny, of_class
from tests.support.tiny.models import draw

HIDREAM: dict[str, Any] = {
    "attention_head_dim": 32,
    "num_attention_heads": HEADS,
    "axes_dims_rope": [16, 8, 8],
    "num_layers": 2,
    "num_single_layers": 2,
    "llama_layers": [0, 2, 1, 2],
}
"""Sizes in the file's metadata. ComfyUI assumes other sizes; families/conftest.py has a ComfyUI that reads these."""


TINY: Mapping[str, Tiny] = {
    "hidream": Tiny(
        of_class(
            "hidream.model.HiDreamImageTransformer2DModel",
            patch_size=2,
            in_channels=16,
            caption_channels=[4096, 4096],
            **HIDREAM,
        ),
        (16, 10, 14),
        4096,
        lambda tokens: {"conditioning_llama3": draw(1, 3, tokens, 4096, seed=tokens)},
        pooled=2048,
        metadata={"sizes": json.dumps(HIDREAM)},
    ),
}
