"""Lumina 2, small in a ComfyUI that reads sizes from files: each split, a LoRA; and its real width in ComfyUI itself."""

from __future__ import annotations

from typing import ClassVar

from scripts.comfyui import ComfyUI
from tests.support.graphs.comfyui import LatentOf
from tests.support.graphs.family_tests import Families, Sized, assert_real_width
from tests.support.selection import thorough


class TestSized(Sized, Families):
    layers: ClassVar = {
        "lumina": (
            "layers.0.attention.qkv",
            "layers.1.feed_forward.w2",
            "context_refiner.0.attention.out",
            "final_layer.linear",
        ),
    }


@thorough
def test_a_model_of_the_real_width_gives_the_stock_latent(comfyui: ComfyUI, latent_of: LatentOf) -> None:
    assert_real_width(comfyui, latent_of, "wide_lumina")
