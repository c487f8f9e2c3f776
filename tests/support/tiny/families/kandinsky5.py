"""Tiny Kandinsky 5, for videos and pictures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.support.tiny.family import HEADS, Tiny, of_class

KANDINSKY: Mapping[str, Any] = {"time_dim": 64, "ff_dim": 256, "num_text_blocks": 1}


TINY: Mapping[str, Tiny] = {
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
