"""Models for pictures, and some that ComfyUI takes to have a certain width at that width.

These have one block of a kind or two, in fp8. Kandinsky 5 has all tests at that width; the others take hundreds of megabytes
and long, and have theirs small in test_large_classes.
"""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch

from scripts.comfyui import ComfyUI
from tests.support.graphs.comfyui import LatentOf
from tests.support.graphs.comfyui_inputs import MATTERS
from tests.support.graphs.family_tests import (
    Families,
    Given,
    Layers,
    assert_same,
    job,
    save_with_loras,
    save_with_prompts,
)
from tests.support.selection import thorough
from tests.support.tiny.models import draw

pytestmark = thorough

LAYERS: Layers = {
    "kandinsky_image": (
        "visual_transformer_blocks.0.self_attention.to_query",
        "visual_transformer_blocks.1.cross_attention.to_value",
        "text_transformer_blocks.0.feed_forward.out_layer",
        "visual_embeddings.in_layer",
    ),
    "hunyuan_image": (
        "double_blocks.0.img_attn.qkv",
        "double_blocks.1.txt_mlp.2",
        "single_blocks.0.linear1",
        "txt_in.individual_token_refiner.blocks.0.self_attn.qkv",
        "final_layer.linear",
    ),
    "ovis": ("double_blocks.0.img_attn.qkv", "double_blocks.1.txt_mlp.gate_proj", "single_blocks.0.linear1"),
    "lens": ("transformer_blocks.0.attn.img_qkv", "transformer_blocks.1.txt_mlp.w1", "txt_in"),
    "joyimage": ("double_blocks.0.attn.img_attn_qkv", "double_blocks.1.attn.txt_attn_proj", "proj_out"),
    "krea2": (
        "blocks.0.attn.wq",
        "blocks.1.attn.wk",
        "blocks.2.mlp.down",
        "txtfusion.refiner_blocks.0.attn.wv",
        "tproj.1",
        "last.linear",
    ),
    "sd3": (
        "joint_blocks.0.x_block.attn.qkv",
        "joint_blocks.1.x_block.attn2.proj",
        "joint_blocks.1.context_block.mlp.fc1",
        "context_embedder",
        "final_layer.linear",
    ),
    "anima": (
        "blocks.0.self_attn.q_proj",
        "blocks.9.mlp.layer2",
        "blocks.4.adaln_modulation_mlp.2",
        "llm_adapter.blocks.0.cross_attn.k_proj",
        "final_layer.linear",
    ),
    "longcat": (
        "double_blocks.0.img_attn.qkv",
        "double_blocks.1.txt_mlp.2",
        "single_blocks.0.linear1",
        "final_layer.linear",
    ),
}

GIVEN: Mapping[str, Given] = {
    "hunyuan image, words in quotation marks": Given(
        "hunyuan_image", {"conditioning_byt5small": draw(1, 3, 1472, seed=31)}
    ),
    "hunyuan image, masked text": Given(  # on one side, as a longer prompt on the other would have it
        "hunyuan_image", {"attention_mask": torch.tensor([[1, 1, 1, 1, 1, 0, 0]])}, sides=("positive",)
    ),
    "joyimage, references": Given("joyimage", references=((16, 1, 6, 5), (16, 1, 3, 4)), sides=("positive",)),
    "krea 2, references": Given("krea2", references=((16, 1, 6, 5), (16, 1, 3, 4)), method="index"),
    "krea 2, references without noise": Given(
        "krea2", references=((16, 1, 6, 5), (16, 1, 3, 4)), method="index_timestep_zero", sides=("positive",)
    ),
    "longcat-image, a picture to edit": Given("longcat", references=((16, 6, 5),)),
}

WIDE = ("wide_lumina", "wide_radiance", "wide_auraflow", "wide_ideogram", "wide_mage_flow")


@pytest.fixture(scope="module", autouse=True)
def _files(comfyui: ComfyUI) -> None:
    save_with_loras(comfyui, LAYERS)


class TestImages(Families):
    layers = LAYERS
    given = GIVEN
    matters = MATTERS


@pytest.mark.parametrize("name", WIDE)
def test_real_width(name: str, comfyui: ComfyUI, latent_of: LatentOf) -> None:
    """In one step, as all weights are cast in each call."""
    save_with_prompts(comfyui, name)
    assert_same(latent_of, name, "ulysses 2", job(name, steps=1))
    (comfyui.base_dir / "models" / "diffusion_models" / f"{name}.safetensors").unlink()  # some take a gigabyte
