"""Qwen-Image, Z-Image and Chroma at the width that ComfyUI assumes: masks and references, padded tokens, modulation."""

from __future__ import annotations

from typing import Any

import pytest

from scripts.comfyui import ComfyUI
from tests.support.graphs.comfyui import LatentOf, save_latent, with_reference
from tests.support.graphs.comfyui_inputs import MATTERS
from tests.support.graphs.family_checks import assert_stock
from tests.support.graphs.flux import insert_after, step_by_step
from tests.support.graphs.wide import save_wide_with_prompts, wide
from tests.support.latents import relative_error
from tests.support.selection import thorough

pytestmark = thorough

TWO = {"devices": "cpu:2"}
SHARDED = {"devices": "cpu:2", "ring": 2, "weights": "sharded"}


@pytest.fixture(scope="module", autouse=True)
def _files(comfyui: ComfyUI) -> None:
    for name in ("wide_qwen", "wide_z_image", "wide_chroma"):
        save_wide_with_prompts(comfyui, name)
    save_latent(comfyui, "wide-first", 1, 16, 1, 7, 5)
    save_latent(comfyui, "wide-second", 1, 16, 1, 4, 6)


@pytest.mark.parametrize(
    ("name", "plan"),
    [
        ("wide_chroma", {"devices": "cpu:2", "pipefusion": 2, "warmup_steps": 99}),
        ("wide_chroma", TWO),
        ("wide_z_image", TWO),
        ("wide_z_image", SHARDED),
    ],
)
def test_padded_tokens_and_modulation_for_all_blocks_give_the_stock_latent(
    name: str, plan: dict[str, Any], latent_of: LatentOf
) -> None:
    """Z-Image pads its tokens. A network outside Chroma's blocks computes their modulation."""
    assert_stock(latent_of, wide(name), **plan)


@pytest.mark.parametrize("plan", [TWO, SHARDED])
def test_masked_text_gives_the_stock_latent(plan: dict[str, Any], latent_of: LatentOf) -> None:
    graph = wide("wide_qwen", "-masked")
    assert relative_error(latent_of(wide("wide_qwen")), latent_of(graph)) > MATTERS
    assert_stock(latent_of, graph, **plan)


@pytest.mark.parametrize("plan", [{"devices": "cpu:2", "ulysses": 2}, {"devices": "cpu:2", "cfg": 2}])
def test_masked_text_one_model_call_at_a_time_gives_the_stock_latent(plan: dict[str, Any], latent_of: LatentOf) -> None:
    assert_stock(latent_of, step_by_step(wide("wide_qwen", "-masked")), strict=False, **plan)


@pytest.mark.parametrize("plan", [TWO, {"devices": "cpu:2", "ring": 2}])
def test_two_references_without_noise_give_the_stock_latent(plan: dict[str, Any], latent_of: LatentOf) -> None:
    """The references of Qwen-Image-Edit 2511 have a timestep of zero."""
    graph = with_reference(with_reference(wide("wide_qwen"), "wide-first"), "wide-second")
    last = graph["sampler"]["inputs"]["positive"][0]
    method = {"reference_latents_method": "index_timestep_zero"}
    edited = insert_after(graph, last, "FluxKontextMultiReferenceLatentMethod", "conditioning", **method)
    assert relative_error(latent_of(graph), latent_of(edited)) > MATTERS
    assert_stock(latent_of, edited, **plan)
