"""HunyuanImage, and Kandinsky 5 for pictures, Lumina 2 and Chroma Radiance at the width that ComfyUI takes them to have.

The last three have one block of a kind or two, in fp8; the last two take gigabytes and long, and are small in test_comfy_sized.
"""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file

from scripts.comfyui import ComfyUI
from tests.host.comfy_graphs import EVERY_SPLIT, LatentOf
from tests.host.conftest import relative_error
from tests.host.graphs import insert_after
from tests.host.more_families import (
    Given,
    Layers,
    assert_given,
    assert_lora,
    assert_same,
    job,
    save_with_loras,
    save_with_prompts,
)
from tests.host.test_comfy_wide import MATTERS
from tests.selection import thorough
from tests.tiny_models import draw

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
}


@pytest.fixture(scope="module", autouse=True)
def _files(comfyui: ComfyUI) -> None:
    save_with_loras(comfyui, LAYERS)


@pytest.mark.parametrize("split", EVERY_SPLIT)
@pytest.mark.parametrize("name", LAYERS)
def test_every_split_gives_the_stock_result(name: str, split: str, latent_of: LatentOf) -> None:
    assert_same(latent_of, name, split, job(name))


@pytest.mark.parametrize("name", LAYERS)
def test_lora(name: str, latent_of: LatentOf) -> None:
    assert_lora(latent_of, name, "sharded", MATTERS)


@pytest.mark.parametrize("split", ["ring 3", "pipefusion 2"])
def test_glyphs(split: str, comfyui: ComfyUI, latent_of: LatentOf) -> None:
    """HunyuanImage's words in quotation marks."""
    glyphs = {"conditioning_byt5small": draw(1, 3, 1472, seed=31)}
    assert_given(comfyui, latent_of, Given("hunyuan_image", glyphs), split, MATTERS)


@pytest.mark.parametrize("split", ["ring 3", "pipefusion 2"])
def test_masked_text(split: str, comfyui: ComfyUI, latent_of: LatentOf) -> None:
    """On one side, as a longer prompt on the other would have it."""
    name = "hunyuan_image"
    save_file(
        {"attention_mask": torch.tensor([[1, 1, 1, 1, 1, 0, 0]])}, comfyui.input_dir / "five-of-seven.safetensors"
    )
    plain = job(name)
    graph = insert_after(plain, "positive", "PackPrompt", "conditioning", file="five-of-seven.safetensors")
    assert relative_error(latent_of(plain), latent_of(graph)) > MATTERS
    assert_same(latent_of, name, split, graph)


@pytest.mark.parametrize("name", ["wide_lumina", "wide_radiance"])
def test_real_width(name: str, comfyui: ComfyUI, latent_of: LatentOf) -> None:
    save_with_prompts(comfyui, name)
    assert_same(latent_of, name, "ulysses 2", job(name))
