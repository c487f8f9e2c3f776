"""HunyuanImage 2.1, its refiner and its VAE through a real ComfyUI: each split, a LoRA, further text inputs."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch

from scripts.comfyui import ComfyUI
from tests.support.graphs.comfyui import (
    DIFFERENT,
    EVERY_SPLIT,
    TOKENS,
    TOLERANCE,
    LatentOf,
    graph_of,
    save_families,
    save_latent,
    spread,
)
from tests.support.graphs.comfyui_inputs import MATTERS
from tests.support.graphs.family_tests import FamiliesGiven, Given, save_lora_of
from tests.support.graphs.flux import Graph, node
from tests.support.graphs.loras import with_lora
from tests.support.graphs.sized_vaes import SizedVAE
from tests.support.latents import relative_error
from tests.support.selection import thorough
from tests.support.tiny.comfyui import TINY
from tests.support.tiny.families.hunyuan import LAYERS
from tests.support.tiny.models import draw


class TestImages(FamiliesGiven):
    layers: ClassVar = {"hunyuan_image": LAYERS}
    given: ClassVar = {
        "hunyuan image, words in quotation marks": Given(
            "hunyuan_image", {"conditioning_byt5small": draw(1, 3, 1472, seed=31)}
        ),
        "hunyuan image, masked text": Given(  # on one branch, as with a longer prompt on the other branch
            "hunyuan_image", {"attention_mask": torch.tensor([[1, 1, 1, 1, 1, 0, 0]])}, sides=("positive",)
        ),
    }
    matters = MATTERS


class TestSized(SizedVAE):
    vae = "hunyuan_image"


REFINER = (
    "double_blocks.0.img_attn.qkv",
    "single_blocks.1.linear1",
    "txt_in.individual_token_refiner.blocks.0.self_attn.qkv",
    "final_layer.linear",
)


def refining() -> Graph:
    """Return a graph that refines a latent with HunyuanImage 2.1's second model."""
    graph = graph_of("refiner")
    sides = {side: [side, 0] for side in TOKENS}
    graph["refine"] = node("HunyuanRefinerLatent", **sides, latent=["latent", 0], noise_augmentation=0.1)
    graph["sampler"]["inputs"] |= {"positive": ["refine", 0], "negative": ["refine", 1], "latent_image": ["refine", 2]}
    return graph


@pytest.fixture(scope="module")
def _refiner(comfyui: ComfyUI) -> None:
    save_families(comfyui, "refiner")
    save_latent(comfyui, "refiner", 1, *TINY["refiner"].latent)
    save_lora_of(comfyui, "refiner", REFINER)


@thorough
@pytest.mark.usefixtures("_refiner")
@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("plan", EVERY_SPLIT)
def test_the_refiner_gives_the_stock_latent(plan: str, lora: bool, latent_of: LatentOf) -> None:
    graph = refining()
    stock = latent_of(with_lora(graph, "refiner", 0.8) if lora else graph)
    if lora:
        assert relative_error(latent_of(graph), stock) > DIFFERENT
        graph = with_lora(graph, "refiner", 0.8)
    assert relative_error(latent_of(spread(graph, **EVERY_SPLIT[plan])), stock) <= TOLERANCE
