"""FLUX.2 through Load Parallel Diffusion Model, against the stock loader in the same ComfyUI."""

from __future__ import annotations

from typing import Any

import pytest

from scripts.comfyui import ComfyUI
from tests.support.graphs.comfyui import SOME_PLANS, LatentOf, graph_of, save_families, save_latent, with_reference
from tests.support.graphs.family_checks import (
    assert_references,
    assert_stale_patches_depend_on_patches_and_warmup_alone,
    assert_stock,
)
from tests.support.graphs.flux import node
from tests.support.selection import thorough


@pytest.fixture(scope="module", autouse=True)
def _files(comfyui: ComfyUI) -> None:
    save_families(comfyui, "flux2")
    save_latent(comfyui, "reference", 1, 128, 3, 4)
    save_latent(comfyui, "picture", 1, 128, 5, 7)


def test_the_automatic_plan_gives_the_stock_result(latent_of: LatentOf) -> None:
    assert_stock(latent_of, graph_of("flux2"))


@pytest.mark.parametrize(
    "plan",
    [
        {"devices": "cpu:4", "cfg": 2, "ulysses": 2},
        {"devices": "cpu:4", "pipefusion": 2, "ulysses": 2, "warmup_steps": 99},
    ],
)
def test_every_kind_of_split_gives_the_stock_result(plan: dict[str, Any], latent_of: LatentOf) -> None:
    assert_stock(latent_of, graph_of("flux2"), **plan)


def test_references_give_the_stock_latent(latent_of: LatentOf) -> None:
    assert_references(latent_of, "flux2", "reference")


@pytest.mark.parametrize("plan", SOME_PLANS)
def test_image_to_image_gives_the_stock_latent(plan: dict[str, Any], latent_of: LatentOf) -> None:
    graph = graph_of("flux2", denoise=0.5) | {"latent": node("LoadLatent", latent="picture.latent")}
    assert_stock(latent_of, graph, **plan)


@thorough  # tests/engine/test_products.py tests references in patches
def test_stale_patches_depend_only_on_patches_and_warmup(latent_of: LatentOf) -> None:
    """The graph has a reference."""
    graph = with_reference(graph_of("flux2", steps=4), "reference")
    assert_stale_patches_depend_on_patches_and_warmup_alone(latent_of, graph)
