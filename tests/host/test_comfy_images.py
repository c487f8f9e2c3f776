"""Declared picture models through Load Parallel Diffusion Model, against the stock loader in the same ComfyUI."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from safetensors.torch import save_file

from scripts.comfyui import ComfyUI
from tests.host.comfy_graphs import TOKENS, TOLERANCE, LatentOf, graph_of, spread
from tests.host.conftest import relative_error
from tests.host.graphs import Graph, insert_after_model, node
from tests.tiny_comfy import TINY, save_tiny

LATENTS = {
    "longcat": node("EmptySD3LatentImage", width=112, height=72, batch_size=1),
    "krea2": node("EmptyHunyuanLatentVideo", width=112, height=72, length=1, batch_size=1),
    "sd3": node("EmptySD3LatentImage", width=112, height=80, batch_size=1),
}


@pytest.fixture
def graph_with(comfyui: ComfyUI) -> Callable[[str], Graph]:
    """The stock graph of a model, which is written with its prompts."""

    def make(name: str) -> Graph:
        save_tiny(comfyui.base_dir / "models" / "diffusion_models", name)
        graph = graph_of("wan") | {"latent": LATENTS[name]}
        graph["model"]["inputs"]["unet_name"] = f"{name}.safetensors"
        for side, tokens in TOKENS.items():
            [(cond, options)] = TINY[name].prompt(tokens, seed=tokens)
            save_file({"cond": cond, **options}, comfyui.input_dir / f"{name}-{side}.safetensors")
            graph[side]["inputs"]["conditioning"] = f"{name}-{side}.safetensors"
        return graph

    return make


@pytest.mark.parametrize("name", ["krea2", "sd3"])
def test_a_declared_model_gives_the_stock_result(
    name: str, graph_with: Callable[[str], Graph], latent_of: LatentOf
) -> None:
    """SD 3's positions, which are no parameter of ComfyUI's class, are loaded too."""
    graph = graph_with(name)
    assert relative_error(latent_of(spread(graph)), latent_of(graph)) <= TOLERANCE


def test_easycache_does_nothing_to_a_class_that_does_not_know_it(
    graph_with: Callable[[str], Graph], latent_of: LatentOf
) -> None:
    """As with the stock loader: ComfyUI's SD 3 asks no wrappers."""
    settings = {"reuse_threshold": 3.0, "start_percent": 0.0, "end_percent": 1.0, "verbose": False}
    graph = graph_with("sd3")
    cached = insert_after_model(graph, "EasyCache", **settings)
    assert relative_error(latent_of(spread(cached, strict=False)), latent_of(graph)) <= TOLERANCE


def test_positions_that_a_model_class_moves(graph_with: Callable[[str], Graph], latent_of: LatentOf) -> None:
    """LongCat-Image's by the length of its text, one forward a call."""
    graph = graph_with("longcat")
    assert relative_error(latent_of(spread(graph, strict=False)), latent_of(graph)) <= TOLERANCE
