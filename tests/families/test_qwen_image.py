"""Qwen-Image's masks and references, at the width that ComfyUI assumes."""

from __future__ import annotations

from typing import Any

import pytest

from scripts.comfyui import ComfyUI
from tests.support.graphs.comfyui import TOLERANCE, LatentOf, save_latent, spread, with_reference
from tests.support.graphs.comfyui_inputs import MATTERS
from tests.support.graphs.family_checks import assert_stock
from tests.support.graphs.flux import node, step_by_step
from tests.support.graphs.wide import save_wide_with_prompts, wide
from tests.support.latents import relative_error
from tests.support.selection import thorough

pytestmark = thorough


@pytest.fixture(scope="module", autouse=True)
def _files(comfyui: ComfyUI) -> None:
    save_wide_with_prompts(comfyui, "wide_qwen")
    save_latent(comfyui, "wide-first", 1, 16, 1, 7, 5)
    save_latent(comfyui, "wide-second", 1, 16, 1, 4, 6)


@pytest.mark.parametrize("plan", [{"devices": "cpu:2"}, {"devices": "cpu:2", "ring": 2, "weights": "sharded"}])
def test_masked_text_gives_the_stock_latent(plan: dict[str, Any], latent_of: LatentOf) -> None:
    graph = wide("wide_qwen", "-masked")
    stock = latent_of(graph)
    assert relative_error(latent_of(wide("wide_qwen")), stock) > MATTERS
    assert relative_error(latent_of(spread(graph, **plan)), stock) <= TOLERANCE


@pytest.mark.parametrize("plan", [{"devices": "cpu:2", "ulysses": 2}, {"devices": "cpu:2", "cfg": 2}])
def test_masked_text_one_model_call_at_a_time_gives_the_stock_latent(plan: dict[str, Any], latent_of: LatentOf) -> None:
    graph = step_by_step(wide("wide_qwen", "-masked"))
    assert_stock(latent_of, graph, strict=False, **plan)


@pytest.mark.parametrize("plan", [{"devices": "cpu:2"}, {"devices": "cpu:2", "ring": 2}])
def test_two_references_without_noise_give_the_stock_latent(plan: dict[str, Any], latent_of: LatentOf) -> None:
    """The references of Qwen-Image-Edit 2511 have a timestep of zero."""
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
