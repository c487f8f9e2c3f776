"""MiniMax-H3 through a real ComfyUI against its own loader: video with sound, packed in one latent, both compared."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

from scripts.comfyui import ComfyUI
from tests.support.graphs.comfyui import DIFFERENT, PLANS, save_families, spread
from tests.support.graphs.family_checks import one_quick
from tests.support.graphs.family_tests import save_lora_of
from tests.support.graphs.flux import UNKNOWN_WRAPPER, insert_after_model, node, step_by_step
from tests.support.graphs.sound import SHOWN, assert_same, shown, sound_graph
from tests.support.graphs.sound_tests import (
    LORA_PLANS,
    SOUND_PLANS,
    Stock,
    assert_latent_is_refused,
    assert_lora,
    assert_one_forward_at_a_time,
    assert_sampler,
    every_sampler,
    packed,
    stock_of,
    with_masked_sound,
)
from tests.support.latents import relative_error
from tests.support.selection import thorough

CLASSES = Path(os.environ["COMFYUI_PATH"], "comfy", "model_base.py")
SHOWS_NOISE = re.search(r"def scale_latent_inpaint\(.*denoise_mask", CLASSES.read_text(encoding="utf-8")) is not None
"""True if the model receives the latent outside a mask with some noise, as from ComfyUI 0.33 on."""

LORA = (
    "blocks.0.attn.qkv_proj",
    "blocks.1.mlp.fc2",
    "blocks.2.adaln_proj.linear",
    "token_refiner.blocks.0.attn.out_proj",
    "audio_patch_proj",
    "final_layer.video_out",
)


@pytest.fixture(scope="module")
def stock(comfyui: ComfyUI) -> Stock:
    return stock_of(comfyui)


@pytest.fixture(scope="module", autouse=True)
def _files(comfyui: ComfyUI) -> None:
    save_families(comfyui, "minimax")


@pytest.fixture(scope="module")
def more_files(comfyui: ComfyUI) -> None:
    """Save the pruned version of the model and a LoRA."""
    save_families(comfyui, "minimax_curves")
    save_lora_of(comfyui, "minimax", LORA)


@pytest.mark.parametrize("plan", one_quick(SOUND_PLANS, 3))
def test_video_and_sound_give_the_stock_latents(plan: dict[str, Any], comfyui: ComfyUI, stock: Stock) -> None:
    graph = sound_graph("minimax")
    assert_same(comfyui, spread(graph, **plan), stock(graph))


@thorough
@pytest.mark.usefixtures("more_files")
@pytest.mark.parametrize("plan", LORA_PLANS)
def test_a_lora_gives_the_stock_latents(plan: dict[str, Any], comfyui: ComfyUI, stock: Stock) -> None:
    assert_lora(comfyui, stock, "minimax", plan)


def test_one_model_call_at_a_time_gives_the_stock_latents(comfyui: ComfyUI, stock: Stock) -> None:
    assert_one_forward_at_a_time(comfyui, stock, "minimax")


@thorough
@every_sampler("minimax")
def test_every_sampler_gives_the_stock_latents(
    sampler: str, name: str, split: dict[str, Any], comfyui: ComfyUI, stock: Stock
) -> None:
    assert_sampler(comfyui, stock, name, sampler, split)


@thorough
@pytest.mark.usefixtures("more_files")
@pytest.mark.parametrize("plan", SOUND_PLANS)
def test_the_pruned_files_curves_instead_of_a_time_embedder_give_the_stock_latents(
    plan: dict[str, Any], comfyui: ComfyUI, stock: Stock
) -> None:
    """Only the pruned file has these curves."""
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


@thorough
@pytest.mark.parametrize("plan", SOUND_PLANS)
@pytest.mark.parametrize("both_masked", [False, True])
def test_a_mask_of_the_sound_gives_the_stock_latents(
    both_masked: bool, plan: dict[str, Any], comfyui: ComfyUI, stock: Stock
) -> None:
    """A part of the sound stays, with the video's first frame or without."""
    plain, graph = with_masked_sound(comfyui, "minimax", (24, 7, 8, 6), (32, 2, 37), both_masked=both_masked)
    expected = stock(graph)
    assert relative_error(stock(plain)[1], expected[1]) > DIFFERENT
    way = "a mask with the model MiniMaxH3" if SHOWS_NOISE else "loop"
    assert_same(comfyui, spread(graph, **plan, strict=not SHOWS_NOISE), expected, way)


@pytest.mark.parametrize(
    ("latent", "said"),
    [
        (node("LoadLatent", latent="silent.latent"), "holds a video alone"),
        (packed("two", "two sounds"), "makes one video at a time"),
    ],
)
def test_latents_of_other_kinds_are_refused(comfyui: ComfyUI, latent: Any, said: str) -> None:
    assert_latent_is_refused(comfyui, "minimax", latent, said)
