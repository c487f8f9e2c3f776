"""Declared picture models through Load Parallel Diffusion Model, against the stock loader in the same ComfyUI."""

from __future__ import annotations

import pytest

from scripts.comfyui import ComfyUI
from tests.support.graphs.comfyui import TOLERANCE, LatentOf, spread
from tests.support.graphs.comfyui_inputs import graph_with
from tests.support.graphs.flux import insert_after_model
from tests.support.latents import relative_error


@pytest.mark.parametrize("name", ["krea2", "sd3"])
def test_a_declared_model_gives_the_stock_result(name: str, comfyui: ComfyUI, latent_of: LatentOf) -> None:
    """SD 3's positions, which are no parameter of ComfyUI's class, are loaded too."""
    graph = graph_with(comfyui, name)
    assert relative_error(latent_of(spread(graph)), latent_of(graph)) <= TOLERANCE


def test_easycache_does_nothing_to_a_class_that_does_not_know_it(comfyui: ComfyUI, latent_of: LatentOf) -> None:
    """As with the stock loader: ComfyUI's SD 3 asks no wrappers."""
    settings = {"reuse_threshold": 3.0, "start_percent": 0.0, "end_percent": 1.0, "verbose": False}
    graph = graph_with(comfyui, "sd3")
    cached = insert_after_model(graph, "EasyCache", **settings)
    assert relative_error(latent_of(spread(cached, strict=False)), latent_of(graph)) <= TOLERANCE


def test_positions_that_a_model_class_moves(comfyui: ComfyUI, latent_of: LatentOf) -> None:
    """LongCat-Image's by the length of its text, one forward a call."""
    graph = graph_with(comfyui, "longcat")
    assert relative_error(latent_of(spread(graph, strict=False)), latent_of(graph)) <= TOLERANCE
