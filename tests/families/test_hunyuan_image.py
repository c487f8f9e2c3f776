"""HunyuanImage 2.1's refiner through a real ComfyUI against its own loader: each split, a LoRA."""

from __future__ import annotations

import pytest

from scripts.comfyui import ComfyUI
from tests.support.graphs.comfyui import EVERY_SPLIT, TOKENS, LatentOf, graph_of, save_families, save_latent
from tests.support.graphs.family_checks import assert_matters_and_stock, assert_stock
from tests.support.graphs.family_tests import save_lora_of
from tests.support.graphs.flux import Graph, node
from tests.support.graphs.loras import with_lora
from tests.support.selection import thorough
from tests.support.tiny.comfyui import TINY

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
    if lora:
        assert_matters_and_stock(latent_of, refining(), with_lora(refining(), "refiner", 0.8), **EVERY_SPLIT[plan])
    else:
        assert_stock(latent_of, refining(), **EVERY_SPLIT[plan])
