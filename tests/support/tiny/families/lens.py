"""Tiny Lens."""

from __future__ import annotations

from collections.abc import Mapping

from tests.support.tiny.family import HEADS, Tiny, of_class, shown

TINY: Mapping[str, Tiny] = {
    "lens": Tiny(
        of_class("lens.model.LensTransformer2DModel", num_layers=3, num_attention_heads=HEADS),
        (128, 5, 7),
        4 * 2880,
        shown,
    ),
}
