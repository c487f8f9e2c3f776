"""Chroma Radiance, small in a ComfyUI that reads sizes from files: each split, a LoRA; and its real width in ComfyUI itself."""

from __future__ import annotations

from typing import ClassVar

from scripts.comfyui import ComfyUI
from tests.support.graphs.comfyui import LatentOf
from tests.support.graphs.family_tests import Families, Sized, assert_real_width
from tests.support.selection import thorough


class TestSized(Sized, Families):
    layers: ClassVar = {
        "radiance": ("double_blocks.0.img_attn.qkv", "double_blocks.0.txt_mlp.0", "single_blocks.0.linear1"),
    }
    refused = (("radiance", "pipefusion 2"),)  # tests/refusals/inputs.py tests the refusal


@thorough
def test_a_model_of_the_real_width_gives_the_stock_latent(comfyui: ComfyUI, latent_of: LatentOf) -> None:
    assert_real_width(comfyui, latent_of, "wide_radiance")
