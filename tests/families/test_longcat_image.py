"""LongCat-Image through a real ComfyUI against its own loader: each split, a LoRA, a picture to edit."""

from __future__ import annotations

from typing import ClassVar

from scripts.comfyui import ComfyUI
from tests.support.graphs.comfyui import LatentOf
from tests.support.graphs.comfyui_inputs import MATTERS, graph_with
from tests.support.graphs.family_checks import assert_stock
from tests.support.graphs.family_tests import FamiliesGiven, Given


class TestImages(FamiliesGiven):
    layers: ClassVar = {
        "longcat": (
            "double_blocks.0.img_attn.qkv",
            "double_blocks.1.txt_mlp.2",
            "single_blocks.0.linear1",
            "final_layer.linear",
        ),
    }
    given: ClassVar = {"longcat-image, a picture to edit": Given("longcat", references=((16, 6, 5),))}
    matters = MATTERS


def test_positions_that_a_model_class_shifts_give_the_stock_latent(comfyui: ComfyUI, latent_of: LatentOf) -> None:
    """The class shifts positions by the length of its text, one model call at a time."""
    assert_stock(latent_of, graph_with(comfyui, "longcat"), strict=False)
