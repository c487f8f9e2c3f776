"""MiniMax-H3 through a real ComfyUI against its own loader: the pruned file, its nodes and references; both latents compared."""

from __future__ import annotations

from typing import Any

import pytest

from scripts.comfyui import ComfyUI
from tests.support.graphs.comfyui import DIFFERENT, PLANS, save_families, spread
from tests.support.graphs.flux import UNKNOWN_WRAPPER, insert_after_model, node, step_by_step
from tests.support.graphs.sound import SHOWN, assert_same, shown, sound_graph
from tests.support.graphs.sound_tests import SOUND_PLANS, Stock
from tests.support.latents import relative_error
from tests.support.selection import thorough


@pytest.fixture(scope="module", autouse=True)
def _files(comfyui: ComfyUI) -> None:
    save_families(comfyui, "minimax")


@thorough
@pytest.mark.parametrize("plan", SOUND_PLANS)
def test_the_pruned_files_curves_instead_of_a_time_embedder_give_the_stock_latents(
    plan: dict[str, Any], comfyui: ComfyUI, stock: Stock
) -> None:
    """Only the pruned file has these curves."""
    save_families(comfyui, "minimax_curves")
    graph = sound_graph("minimax_curves")
    assert_same(comfyui, spread(graph, **plan), stock(graph))


def test_the_sigma_shift_node_gives_the_stock_latents(comfyui: ComfyUI, stock: Stock) -> None:
    """Only the model reads the node's values, to derive the sound's schedule from the video's."""
    plain = sound_graph("minimax", steps=2)
    graph = insert_after_model(plain, "MiniMaxH3SigmaShift", shift_video=9.0, shift_audio=5.0)
    expected = stock(graph)
    alike = insert_after_model(plain, "MiniMaxH3SigmaShift", shift_video=9.0, shift_audio=9.0)
    assert relative_error(stock(alike)[1], expected[1]) > DIFFERENT
    assert_same(comfyui, spread(graph, **PLANS[0]), expected)


@pytest.mark.parametrize(
    ("what", "plan"),
    [
        pytest.param(what, plan, marks=[thorough] * ((what, plan) != ("references with sound", PLANS[0])))
        for what in SHOWN
        for plan in SOUND_PLANS
    ],
)
def test_references_before_the_video_give_the_stock_latents(
    what: str, plan: dict[str, Any], comfyui: ComfyUI, stock: Stock
) -> None:
    """A seed larger than any signed 64-bit number draws the noise that the model adds to pictures."""
    graph = shown(what, seed=2**64 - 2)
    expected = stock(graph)
    assert relative_error(stock(sound_graph("minimax", steps=2, seed=2**64 - 2))[0], expected[0]) > DIFFERENT
    assert_same(comfyui, spread(graph, **plan), expected)


@thorough
@pytest.mark.parametrize("what", SHOWN)
def test_references_one_model_call_at_a_time_give_the_stock_latents(what: str, comfyui: ComfyUI, stock: Stock) -> None:
    graph = step_by_step(shown(what))
    assert_same(comfyui, spread(graph, strict=False, **PLANS[0]), stock(graph), UNKNOWN_WRAPPER)


def test_the_guider_and_sampler_of_comfyuis_template_give_the_stock_latents(comfyui: ComfyUI, stock: Stock) -> None:
    """The graph has the nodes of ComfyUI's template of MiniMax-H3."""
    graph = sound_graph("minimax")
    links = {name: [name, 0] for name in ("noise", "guider", "sigmas")}
    graph |= {
        "noise": node("RandomNoise", noise_seed=7),
        "guider": node("BasicGuider", model=["model", 0], conditioning=["positive", 0]),
        "select": node("KSamplerSelect", sampler_name="res_multistep"),
        "sigmas": node("BasicScheduler", model=["model", 0], scheduler="simple", steps=3, denoise=1.0),
        "sampler": node("SamplerCustomAdvanced", **links, sampler=["select", 0], latent_image=["latent", 0]),
    }
    assert_same(comfyui, spread(graph, strict=False, **PLANS[0]), stock(graph))
