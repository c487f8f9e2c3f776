"""MageFlow, small in a ComfyUI that reads sizes from files: each split, a LoRA, references; its real width in ComfyUI itself."""

from __future__ import annotations

from typing import ClassVar

from scripts.comfyui import ComfyUI
from tests.support.graphs.comfyui import LatentOf
from tests.support.graphs.family_tests import FamiliesGiven, Given, Sized, assert_real_width
from tests.support.selection import thorough


class TestSized(Sized, FamiliesGiven):
    layers: ClassVar = {
        "mage_flow": ("transformer_blocks.0.attn.to_q", "transformer_blocks.1.attn.add_k_proj", "img_in"),
    }
    given: ClassVar = {
        "mage-flow, references": Given("mage_flow", references=((128, 3, 5), (128, 2, 2)), sides=("positive",)),
    }


@thorough
def test_a_model_of_the_real_width_gives_the_stock_latent(comfyui: ComfyUI, latent_of: LatentOf) -> None:
    assert_real_width(comfyui, latent_of, "wide_mage_flow")
