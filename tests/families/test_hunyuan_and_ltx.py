"""ComfyUI's own video models through Load Parallel Diffusion Model, against the stock loader in the same ComfyUI."""

from __future__ import annotations

from typing import Any

import pytest
from safetensors.torch import load_file

from scripts.comfyui import ComfyUI
from tests.support.graphs.comfyui import (
    DIFFERENT,
    EVERY_SPLIT,
    PLANS,
    TOKENS,
    TOLERANCE,
    LatentOf,
    graph_of,
    save_families,
    save_latent,
    spread,
    with_guides,
)
from tests.support.graphs.flux import node, step_by_step
from tests.support.graphs.loras import save_lora, with_lora
from tests.support.graphs.videos import GIVEN
from tests.support.latents import relative_error
from tests.support.selection import thorough
from tests.support.tiny.comfyui import TINY

MASKED = GIVEN["hunyuan 1.5, masked text"]


@pytest.fixture(scope="module", autouse=True)
def _files(comfyui: ComfyUI) -> None:
    save_families(comfyui, "ltxv", "hunyuan15", "meanflow")


@pytest.fixture(scope="module")
def _refiner(comfyui: ComfyUI) -> None:
    save_families(comfyui, "refiner")
    save_latent(comfyui, "refiner", 1, *TINY["refiner"].latent)
    lora = comfyui.base_dir / "models" / "loras" / "refiner-lora.safetensors"
    save_lora(lora, LORA, load_file(comfyui.base_dir / "models" / "diffusion_models" / "refiner.safetensors"))


@pytest.mark.parametrize(
    ("name", "plan"),
    [
        ("ltxv", {"devices": "cpu:2"}),
        ("hunyuan15", {"devices": "cpu:2"}),
        ("hunyuan15", {"devices": "cpu:2", "pipefusion": 2, "warmup_steps": 99}),
    ],
)
def test_the_stock_result(name: str, plan: dict[str, Any], comfyui: ComfyUI, latent_of: LatentOf) -> None:
    """Text is masked; the first has what its file's header says, the second no single blocks."""
    graph = MASKED.graph(comfyui) if name == MASKED.name else graph_of(name)
    assert relative_error(latent_of(spread(graph, **plan)), latent_of(graph)) <= TOLERANCE


def test_image_to_video(latent_of: LatentOf) -> None:
    """LTX-Video keeps what is outside a mask, and has a timestep for each token."""
    graph = graph_of("ltxv") | {
        "solid": node("SolidMask", value=1.0, width=160, height=128),
        "mask": node("FeatherMask", mask=["solid", 0], left=128, top=0, right=0, bottom=0),
        "masked": node("SetLatentNoiseMask", samples=["latent", 0], mask=["mask", 0]),
    }
    graph["sampler"]["inputs"]["latent_image"] = ["masked", 0]
    stock = latent_of(graph)
    assert relative_error(latent_of(graph_of("ltxv")), stock) > 0.01
    assert relative_error(latent_of(spread(graph)), stock) <= TOLERANCE


@thorough
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("strength", [1.0, 0.7])
def test_guides(comfyui: ComfyUI, strength: float, plan: dict[str, Any], latent_of: LatentOf) -> None:
    """LTX-Video's: one of less strength weighs attention between its tokens and the video's."""
    graph = with_guides(comfyui, graph_of("ltxv"), "latent", strength=strength)
    assert relative_error(latent_of(spread(graph, **plan)), latent_of(graph)) <= TOLERANCE


def test_meanflow(latent_of: LatentOf) -> None:
    """HunyuanVideo 1.5's super-resolution reads the next step's sigma: in the loop, and with one forward a call."""
    graph = graph_of("meanflow")
    assert (
        relative_error(latent_of(spread(graph, "cpu:2", pipefusion=2, warmup_steps=99)), latent_of(graph)) <= TOLERANCE
    )
    stepwise = step_by_step(graph)
    assert relative_error(latent_of(spread(stepwise, strict=False)), latent_of(stepwise)) <= TOLERANCE


LORA = (
    "diffusion_model.double_blocks.0.img_attn.qkv",
    "diffusion_model.single_blocks.1.linear1",
    "diffusion_model.txt_in.individual_token_refiner.blocks.0.self_attn.qkv",
    "diffusion_model.final_layer.linear",
)


@thorough
@pytest.mark.usefixtures("_refiner")
@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("plan", EVERY_SPLIT)
def test_a_picture_is_refined(plan: str, lora: bool, latent_of: LatentOf) -> None:
    """By HunyuanImage 2.1's second model."""
    graph = graph_of("refiner")
    sides = {side: [side, 0] for side in TOKENS}
    graph["refine"] = node("HunyuanRefinerLatent", **sides, latent=["latent", 0], noise_augmentation=0.1)
    graph["sampler"]["inputs"] |= {"positive": ["refine", 0], "negative": ["refine", 1], "latent_image": ["refine", 2]}
    stock = latent_of(with_lora(graph, "refiner", 0.8) if lora else graph)
    if lora:
        assert relative_error(latent_of(graph), stock) > DIFFERENT
        graph = with_lora(graph, "refiner", 0.8)
    assert relative_error(latent_of(spread(graph, **EVERY_SPLIT[plan])), stock) <= TOLERANCE
