"""Qwen-Image, Z-Image and Chroma, whose real width ComfyUI takes for granted: masks, references and padded tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from scripts.comfyui import ComfyUI
from tests.support.graphs.comfyui import TOLERANCE, graph_of, save_latent, spread, with_reference
from tests.support.graphs.comfyui_inputs import MATTERS, TEXT
from tests.support.graphs.flux import Graph, node, step_by_step
from tests.support.latents import relative_error
from tests.support.selection import thorough
from tests.support.tiny.comfyui import save_wide
from tests.support.tiny.models import draw

pytestmark = thorough

TOKENS = 40
SHOWN = {"positive": 25, "negative": 11}
"""Of the text's tokens, where it is masked."""


LATENT = node("EmptySD3LatentImage", width=112, height=80, batch_size=1)

LatentOf = Callable[[Graph], Tensor]


@pytest.fixture(scope="module", autouse=True)
def _files(comfyui: ComfyUI) -> None:
    for name in TEXT:
        save_wide(comfyui.base_dir / "models" / "diffusion_models", name)
        for seed, (side, shown) in enumerate(SHOWN.items()):
            text = {"cond": draw(1, TOKENS, TEXT[name], seed=seed)}
            save_file(text, comfyui.input_dir / f"{name}-{side}.safetensors")
            masked = text | {"attention_mask": (torch.arange(TOKENS) < shown)[None].long()}
            save_file(masked, comfyui.input_dir / f"{name}-masked-{side}.safetensors")
    save_latent(comfyui, "wide-first", 1, 16, 1, 7, 5)
    save_latent(comfyui, "wide-second", 1, 16, 1, 4, 6)


def wide(name: str, prompts: str = "", **settings: Any) -> Graph:
    """A job of 35 tokens, which Z-Image pads."""
    graph = graph_of("wan", **{"steps": 2, "seed": 8} | settings) | {"latent": LATENT}
    graph["model"]["inputs"]["unet_name"] = f"{name}.safetensors"
    for side in SHOWN:
        graph[side]["inputs"]["conditioning"] = f"{name}{prompts}-{side}.safetensors"
    return graph


@pytest.mark.parametrize("plan", [{"devices": "cpu:2"}, {"devices": "cpu:2", "ring": 2, "weights": "sharded"}])
def test_masked_text(plan: dict[str, Any], latent_of: LatentOf) -> None:
    graph = wide("wide_qwen", "-masked")
    stock = latent_of(graph)
    assert relative_error(latent_of(wide("wide_qwen")), stock) > MATTERS
    assert relative_error(latent_of(spread(graph, **plan)), stock) <= TOLERANCE


@pytest.mark.parametrize("plan", [{"devices": "cpu:2", "ulysses": 2}, {"devices": "cpu:2", "cfg": 2}])
def test_masked_text_one_forward_at_a_time(plan: dict[str, Any], latent_of: LatentOf) -> None:
    graph = step_by_step(wide("wide_qwen", "-masked"))
    assert relative_error(latent_of(spread(graph, strict=False, **plan)), latent_of(graph)) <= TOLERANCE


@pytest.mark.parametrize("plan", [{"devices": "cpu:2"}, {"devices": "cpu:2", "ring": 2}])
def test_two_references_without_noise(plan: dict[str, Any], latent_of: LatentOf) -> None:
    """Qwen-Image-Edit 2511's: they have a timestep of zero."""
    graph = with_reference(with_reference(wide("wide_qwen"), "wide-first"), "wide-second")
    method = node(
        "FluxKontextMultiReferenceLatentMethod",
        conditioning=graph["sampler"]["inputs"]["positive"],
        reference_latents_method="index_timestep_zero",
    )
    sampler = node("KSampler", **graph["sampler"]["inputs"] | {"positive": ["method", 0]})
    edited = graph | {"method": method, "sampler": sampler}
    stock = latent_of(edited)
    assert relative_error(latent_of(graph), stock) > MATTERS
    assert relative_error(latent_of(spread(edited, **plan)), stock) <= TOLERANCE


@pytest.mark.parametrize("plan", [{"devices": "cpu:2"}, {"devices": "cpu:2", "weights": "sharded", "ring": 2}])
def test_padded_tokens(plan: dict[str, Any], latent_of: LatentOf) -> None:
    graph = wide("wide_z_image")
    assert relative_error(latent_of(spread(graph, **plan)), latent_of(graph)) <= TOLERANCE


@pytest.mark.parametrize("plan", [{"devices": "cpu:2", "pipefusion": 2, "warmup_steps": 99}, {"devices": "cpu:2"}])
def test_modulation_for_all_blocks(plan: dict[str, Any], latent_of: LatentOf) -> None:
    """Chroma's, which a network outside of the blocks makes."""
    graph = wide("wide_chroma")
    assert relative_error(latent_of(spread(graph, **plan)), latent_of(graph)) <= TOLERANCE
