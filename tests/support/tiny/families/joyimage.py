"""Tiny JoyImage."""

from __future__ import annotations

from collections.abc import Mapping

from tests.support.tiny.family import HEADS, Tiny, of_class

TINY: Mapping[str, Tiny] = {
    "joyimage": Tiny(
        of_class(
            "joyimage.model.JoyImageTransformer3DModel",
            hidden_size=HEADS * 128,
            num_attention_heads=HEADS,
            num_layers=3,
            theta=10000,
        ),
        (16, 1, 9, 14),
        4096,
    ),
}
