"""Normalized attention guidance, which compares both prompts in every attention: exact, one model call at a time."""

from __future__ import annotations

from typing import Any

import pytest

from scripts.comfyui import ComfyUI
from tests.support.graphs.comfyui import TOLERANCE, LatentOf, spread
from tests.support.graphs.comfyui_inputs import graph_with
from tests.support.graphs.diffusers import refused
from tests.support.graphs.family_checks import assert_matters_and_stock
from tests.support.graphs.flux import Graph, insert_after_model, ksampler_graph, node, queue_logged, ways
from tests.support.graphs.guidance import NAG
from tests.support.latents import relative_error
from tests.support.selection import thorough
from tests.support.server import NARROW

PLANS: dict[str, dict[str, Any]] = {
    "ulysses 2": {"devices": "cpu:2", "ulysses": 2},
    "ring 3, sharded": {"devices": "cpu:3", "ring": 3, "weights": "sharded"},
    "ulysses 2 x ring 2": {"devices": "cpu:4", "ulysses": 2, "ring": 2},
    "pp 2": {"devices": "cpu:2", "pipefusion": 2, "warmup_steps": 99},
    "chosen": {"devices": "cpu:2"},
}


def assert_guided(graph: Graph, plan: dict[str, Any], latent_of: LatentOf) -> None:
    guided = insert_after_model(graph, "NAGuidance", **NAG)
    assert_matters_and_stock(latent_of, graph, guided, strict=False, **plan)


@pytest.mark.parametrize("plan", ["ulysses 2", *(pytest.param(plan, marks=thorough) for plan in [*PLANS][1:])])
@pytest.mark.parametrize("batch", [pytest.param(1, marks=thorough), 2])
def test_flux_is_guided_as_on_the_stock_loader(latent_of: LatentOf, plan: str, batch: int) -> None:
    """The latent equals the stock loader's, also at cfg 1, where ComfyUI then computes the negative prompt all the same."""
    assert_guided(ksampler_graph(NARROW, width=72, height=104, steps=2, batch=batch), PLANS[plan], latent_of)


@thorough
@pytest.mark.parametrize("plan", PLANS)
def test_krea2_is_guided_as_on_the_stock_loader(comfyui: ComfyUI, latent_of: LatentOf, plan: str) -> None:
    """The blocks have text and picture in one stream. Both prompts have one length, so ComfyUI puts them into one call."""
    graph = graph_with(comfyui, "krea2")
    graph["negative"] = node("ConditioningMultiply", conditioning=["positive", 0], multiplier=0.5)
    assert_guided(graph, PLANS[plan], latent_of)


def test_texts_of_two_lengths_are_computed_separately_as_on_the_stock_loader(
    comfyui: ComfyUI, latent_of: LatentOf
) -> None:
    """The node then has no effect: ComfyUI's function does not change a call with a single branch."""
    graph = ksampler_graph(NARROW, negative="cond-45", width=72, height=104, steps=2, cfg=2.0)
    guided = insert_after_model(graph, "NAGuidance", **NAG)
    assert relative_error(latent_of(graph), latent_of(guided)) <= TOLERANCE
    run, log = queue_logged(comfyui, spread(guided, strict=False))
    run.check()
    assert ways(log) == ["NAGuidance"]
    assert relative_error(latent_of(spread(guided, strict=False)), latent_of(guided)) <= TOLERANCE


def test_a_plan_that_computes_the_prompts_separately_is_refused(comfyui: ComfyUI) -> None:
    guided = insert_after_model(ksampler_graph(NARROW, cfg=2.0), "NAGuidance", **NAG)
    assert refused(comfyui, spread(guided, strict=False, cfg=2)) == (
        "NAGuidance compares both prompts in every attention layer, but cfg 2 and data 1 would compute them on different GPUs: "
        "choose cfg 1 and data 1 in Parallel Plan, and ulysses, ring or pipefusion instead."
    )
