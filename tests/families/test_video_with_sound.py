"""MiniMax-H3 and LTX-2 through a real ComfyUI against its own loader: video with sound, packed in one latent, both compared.

MiniMax-H3 also with its pruned file, its nodes and references.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from scripts.comfyui import ComfyUI
from tests.support.graphs.combined import with_guider
from tests.support.graphs.comfyui import (
    DIFFERENT,
    PLANS,
    graph_of,
    masked,
    save_families,
    save_latent,
    spread,
)
from tests.support.graphs.diffusers import refused
from tests.support.graphs.family_tests import save_lora_of
from tests.support.graphs.flux import UNKNOWN_WRAPPER, insert_after, insert_after_model, node, step_by_step
from tests.support.graphs.loras import with_lora
from tests.support.graphs.sound import SHOWN, assert_same, shown, sound_graph
from tests.support.graphs.sound_tests import SOUND_PLANS, Stock
from tests.support.latents import relative_error
from tests.support.sampler_names import LOCAL
from tests.support.selection import pairwise, thorough

CLASSES = Path(os.environ["COMFYUI_PATH"], "comfy", "model_base.py")
SHOWS_NOISE = re.search(r"def scale_latent_inpaint\(.*denoise_mask", CLASSES.read_text(encoding="utf-8")) is not None
"""True if MiniMax-H3 receives the latent outside a mask with some noise, as from ComfyUI 0.33 on."""

LORAS: Mapping[str, tuple[str, ...]] = {
    "minimax": (
        "blocks.0.attn.qkv_proj",
        "blocks.1.mlp.fc2",
        "blocks.2.adaln_proj.linear",
        "token_refiner.blocks.0.attn.out_proj",
        "audio_patch_proj",
        "final_layer.video_out",
    ),
    "ltxav": (
        "transformer_blocks.0.attn1.to_q",
        "transformer_blocks.0.audio_ff.net.2",
        "transformer_blocks.1.video_to_audio_attn.to_v",
        "video_embeddings_connector.transformer_1d_blocks.0.attn1.to_k",
        "audio_adaln_single.linear",
        "proj_out",
    ),
}
"""Layers that each family's LoRA changes."""

KEPT: Mapping[str, tuple[tuple[int, int, int, int], tuple[int, int, int]]] = {
    "minimax": ((24, 7, 8, 6), (32, 2, 37)),
    "ltxav": ((128, 3, 5, 4), (8, 11, 16)),
}
"""The shapes of a latent of each family: the video's and the sound's."""


@pytest.fixture(scope="module", autouse=True)
def _files(comfyui: ComfyUI) -> None:
    save_families(comfyui, *LORAS)
    save_latent(comfyui, "ltxav-sound", 1, 8, 11, 16)


@pytest.mark.parametrize(
    ("name", "plan"),
    [pytest.param(name, plan, marks=[thorough] * ("pipefusion" not in plan)) for name in LORAS for plan in SOUND_PLANS],
)
def test_video_and_sound_give_the_stock_latents(
    name: str, plan: dict[str, Any], comfyui: ComfyUI, stock: Stock
) -> None:
    graph = sound_graph(name)
    assert_same(comfyui, spread(graph, **plan), stock(graph))


@thorough
@pytest.mark.parametrize("plan", SOUND_PLANS[2:4])
@pytest.mark.parametrize("name", LORAS)
def test_a_lora_gives_the_stock_latents(name: str, plan: dict[str, Any], comfyui: ComfyUI, stock: Stock) -> None:
    """The LoRA changes both video and sound."""
    save_lora_of(comfyui, name, LORAS[name])
    plain = sound_graph(name, steps=2)
    graph = with_lora(plain, name, 0.8)
    expected = stock(graph)
    for changed, unchanged in zip(expected, stock(plain), strict=True):
        assert relative_error(unchanged, changed) > DIFFERENT
    assert_same(comfyui, spread(graph, **plan), expected)


@pytest.mark.parametrize("name", ["minimax", pytest.param("ltxav", marks=thorough)])
def test_one_model_call_at_a_time_gives_the_stock_latents(name: str, comfyui: ComfyUI, stock: Stock) -> None:
    graph = step_by_step(sound_graph(name, steps=2))
    assert_same(comfyui, spread(graph, strict=False), stock(graph), UNKNOWN_WRAPPER)


@thorough
@pairwise(
    sampler=LOCAL,
    name=tuple(LORAS),
    split={"ulysses 2": PLANS[0], "cfg 2": {"devices": "cpu:2", "cfg": 2}, "pipefusion 2": SOUND_PLANS[3]},
)
def test_every_sampler_gives_the_stock_latents(
    sampler: str, name: str, split: dict[str, Any], comfyui: ComfyUI, stock: Stock
) -> None:
    """The noise covers both latents packed in one.

    CFG++ adds the guidance at full weight in each step, and MiniMax-H3's sound is scaled by up to 4. Rounding of 2e-7 in a
    forward therefore grows to 6e-6 at cfg 1.5, the value that CFG++ is made for, and in proportion to cfg.
    """
    cfg = 1.5 if sampler.endswith("cfg_pp") else 2.5
    graph = sound_graph(name, sampler_name=sampler, steps=4, cfg=cfg)
    assert_same(comfyui, spread(graph, **split), stock(graph))


@thorough
@pytest.mark.parametrize("plan", SOUND_PLANS)
@pytest.mark.parametrize("both_masked", [False, True])
@pytest.mark.parametrize("name", KEPT)
def test_a_mask_of_the_sound_gives_the_stock_latents(
    name: str, both_masked: bool, plan: dict[str, Any], comfyui: ComfyUI, stock: Stock
) -> None:
    """A part of the sound stays, with the video's first frame or without."""
    video, sound = KEPT[name]
    save_latent(comfyui, "kept-video", 1, *video)
    save_latent(comfyui, "kept-sound", 1, *sound)
    plain = sound_graph(name, steps=2) | {
        "video": node("LoadLatent", latent="kept-video.latent"),
        "sound": node("LoadLatent", latent="kept-sound.latent"),
        "latent": packed("video", "sound"),
    }
    _, height, width = sound
    halves = {
        "kept": node("SolidMask", value=0.0, width=width, height=height),
        "made": node("SolidMask", value=0.7, width=width, height=height // 2),
        "of the sound": node("MaskComposite", destination=["kept", 0], source=["made", 0], x=0, y=0, operation="add"),
    }
    graph = insert_after(plain, "sound", "SetLatentNoiseMask", "samples", mask=["of the sound", 0]) | halves
    if both_masked:
        _, frames, height, width = video
        graph = masked(graph, width, height, frames, of="video")
    expected = stock(graph)
    assert relative_error(stock(plain)[1], expected[1]) > DIFFERENT
    noisy = SHOWS_NOISE and name == "minimax"
    way = "a mask with the model MiniMaxH3" if noisy else "loop"
    assert_same(comfyui, spread(graph, **plan, strict=not noisy), expected, way)


def packed(video: str, sound: str) -> Any:
    return node("LTXVConcatAVLatent", video_latent=[video, 0], audio_latent=[sound, 0])


@pytest.mark.parametrize(
    ("name", "latent", "said"),
    [
        ("wan", packed("wan", "sound"), "takes [batch, 16, frames, height, width]"),
        ("ltxav", packed("video", "video"), "takes [batch, 8, length, 16]"),
        ("minimax", node("LoadLatent", latent="silent.latent"), "holds a video alone"),
        ("minimax", packed("two", "two sounds"), "makes one video at a time"),
    ],
)
def test_latents_of_other_kinds_are_refused(name: str, latent: Any, said: str, comfyui: ComfyUI) -> None:
    """The latents are LTX-2's, of MiniMax-H3 alone or for a batch, and Wan's."""
    save_families(comfyui, name)
    shapes = {"silent": (1, 24, 2, 4, 4), "two": (2, 24, 2, 4, 4), "two sounds": (2, 32, 2, 9)}
    for file, shape in shapes.items():
        save_latent(comfyui, file, *shape)
    graph = sound_graph("ltxav") | {file: node("LoadLatent", latent=f"{file}.latent") for file in shapes}
    loaders = {key: graph_of(name)[key] for key in ("model", "positive", "negative")}
    graph |= {**loaders, "wan": graph_of("wan")["latent"], "latent": latent}
    assert said in refused(comfyui, spread(graph))


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
    guider = node("BasicGuider", model=["model", 0], conditioning=["positive", 0])
    graph = with_guider(sound_graph("minimax", steps=2, sampler_name="res_multistep"), guider)
    assert_same(comfyui, spread(graph, strict=False, **PLANS[0]), stock(graph))
