"""ComfyUI's own models through Load Parallel Diffusion Model, against the stock loader in the same ComfyUI."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from scripts.comfyui import ComfyUI
from tests.support.graphs.comfyui import (
    DIFFERENT,
    FLUX1,
    SOME_PLANS,
    TOKENS,
    TOLERANCE,
    LatentOf,
    graph_of,
    save_families,
    save_latent,
    spread,
    with_reference,
)
from tests.support.graphs.flux import Graph, insert_after_model, node, step_by_step
from tests.support.latents import relative_error
from tests.support.selection import thorough
from tests.support.tiny.flux import save_conditioning


@pytest.fixture(scope="module", autouse=True)
def _files(comfyui: ComfyUI) -> None:
    save_families(comfyui, "flux2", "wan", "vace")
    for side, tokens in TOKENS.items():
        save_conditioning(comfyui.input_dir / f"{FLUX1}-{side}.safetensors", tokens)
    save_latent(comfyui, "reference", 1, 128, 3, 4)
    save_latent(comfyui, "reference-flux1", 1, 16, 7, 5)
    save_latent(comfyui, "picture", 1, 128, 5, 7)


@pytest.mark.parametrize("name", ["flux2", "wan", "vace", FLUX1])
def test_automatic_plan_gives_the_stock_result(name: str, latent_of: LatentOf) -> None:
    graph = graph_of(name)
    assert relative_error(latent_of(spread(graph)), latent_of(graph)) <= TOLERANCE


@pytest.mark.parametrize(
    ("name", "plan"),
    [
        ("flux2", {"devices": "cpu:4", "cfg": 2, "ulysses": 2}),
        ("flux2", {"devices": "cpu:4", "pipefusion": 2, "ulysses": 2, "warmup_steps": 99}),
        ("wan", {"devices": "cpu:3", "ring": 3}),
        ("wan", {"devices": "cpu:2", "weights": "sharded"}),
        ("vace", {"devices": "cpu:2", "pipefusion": 2, "warmup_steps": 99}),
        pytest.param(FLUX1, {"devices": "cpu:3", "ring": 3}, marks=thorough),
        pytest.param(FLUX1, {"devices": "cpu:2", "pipefusion": 2, "warmup_steps": 99}, marks=thorough),
        pytest.param(FLUX1, {"devices": "cpu:2", "weights": "sharded"}, marks=thorough),
    ],
)
def test_every_form_gives_the_stock_result(name: str, plan: dict[str, Any], latent_of: LatentOf) -> None:
    graph = graph_of(name)
    assert relative_error(latent_of(spread(graph, **plan)), latent_of(graph)) <= TOLERANCE


@pytest.mark.parametrize(("name", "file"), [("flux2", "reference"), (FLUX1, "reference-flux1")])
def test_references(name: str, file: str, latent_of: LatentOf) -> None:
    """FLUX.2 and FLUX.1 Kontext with a reference picture, in the loop and with one forward a call."""
    graph = with_reference(graph_of(name, cfg=1.0), file)
    stock = latent_of(graph)
    assert relative_error(latent_of(graph_of(name, cfg=1.0)), stock) > DIFFERENT
    assert relative_error(latent_of(spread(graph)), stock) <= TOLERANCE
    stepwise = step_by_step(graph)
    assert relative_error(latent_of(spread(stepwise, strict=False)), latent_of(stepwise)) <= TOLERANCE


@pytest.mark.parametrize("plan", SOME_PLANS)
def test_image_to_image(plan: dict[str, Any], latent_of: LatentOf) -> None:
    graph = graph_of("flux2", denoise=0.5) | {"latent": node("LoadLatent", latent="picture.latent")}
    assert relative_error(latent_of(spread(graph, **plan)), latent_of(graph)) <= TOLERANCE


def test_stock_nodes(latent_of: LatentOf) -> None:
    """A shift of the schedule and a batch."""
    graph = insert_after_model(graph_of("wan"), "ModelSamplingSD3", shift=8.0)
    graph["latent"] = node("EmptyHunyuanLatentVideo", width=80, height=72, length=5, batch_size=2)
    assert relative_error(latent_of(spread(graph)), latent_of(graph)) <= TOLERANCE


STALE_CASES: Mapping[str, Callable[[], Graph]] = {
    "reference": lambda: with_reference(graph_of("flux2", steps=4), "reference"),
    "rows": lambda: graph_of("wan", steps=4),
    "frames": lambda: (
        graph_of("wan", steps=4)
        | {"latent": node("EmptyHunyuanLatentVideo", width=64, height=48, length=21, batch_size=1)}
    ),
}


@pytest.mark.parametrize(  # references over patches: tests/engine/test_products.py
    "case", [pytest.param("reference", marks=thorough), "rows", pytest.param("frames", marks=thorough)]
)
def test_stale_patches_depend_on_patches_and_warmup_alone(case: str, latent_of: LatentOf) -> None:
    graph = STALE_CASES[case]()
    patches = {"patches": 2, "warmup_steps": 1}
    one = latent_of(spread(graph, "cpu:1", pipefusion=1, **patches))
    two = latent_of(spread(graph, "cpu:2", pipefusion=2, **patches))
    four = latent_of(spread(graph, "cpu:4", pipefusion=2, ulysses=2, **patches))
    assert relative_error(two, one) <= TOLERANCE
    assert relative_error(four, one) <= TOLERANCE
    assert relative_error(one, latent_of(graph)) > TOLERANCE, "nothing was stale"
