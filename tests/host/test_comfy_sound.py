"""Video with sound: both are packed in one latent, and both are compared."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

from scripts.comfyui import ComfyUI
from tests.host.comfy_graphs import (
    DIFFERENT,
    PLANS,
    TOLERANCE,
    graph_of,
    masked,
    save_families,
    save_latent,
    spread,
    with_guides,
)
from tests.host.conftest import relative_error, saved_latent
from tests.host.graphs import UNKNOWN_WRAPPER, Graph, insert_after_model, node, queue_logged, step_by_step, ways
from tests.host.test_comfy_wide import MATTERS
from tests.host.test_families import refused
from tests.selection import thorough

SOUND_PLANS: list[dict[str, Any]] = [
    PLANS[0],
    {"devices": "cpu:3", "ring": 3},
    {"devices": "cpu:2", "cfg": 2, "weights": "sharded"},
    {"devices": "cpu:2", "pipefusion": 2, "patches": 1},
    {"devices": "cpu:4", "ulysses": 2, "ring": 2},
]


@pytest.fixture(scope="module", autouse=True)
def _files(comfyui: ComfyUI) -> None:
    save_families(comfyui, "minimax", "ltxav")
    save_latent(comfyui, "ltxav-sound", 1, 8, 11, 16)


def sound_graph(name: str, **settings: Any) -> Graph:
    """The stock graph; the nodes "save" and "save sound" write the two latents."""
    graph = graph_of(name, **settings) | {
        "apart": node("LTXVSeparateAVLatent", av_latent=["sampler", 0]),
        "save": node("SaveLatent", samples=["apart", 0], filename_prefix="video"),
        "save sound": node("SaveLatent", samples=["apart", 1], filename_prefix="sound"),
    }
    if name == "ltxav":
        graph["video"] = node("EmptyLTXVLatentVideo", width=128, height=160, length=17, batch_size=1)
        graph["sound"] = node("LoadLatent", latent="ltxav-sound.latent")
    return graph


def both(server: ComfyUI, graph: Graph) -> tuple[Tensor, Tensor, list[str]]:
    """Video and sound, and how the workers ran it."""
    run, log = queue_logged(server, graph)
    run.check()
    return saved_latent(server, run), saved_latent(server, run, "save sound"), ways(log)


@pytest.fixture(scope="module")
def stock(comfyui: ComfyUI) -> Any:
    """What the stock loader gives, once for each graph."""
    done: dict[str, tuple[Tensor, Tensor]] = {}

    def get(graph: Graph) -> tuple[Tensor, Tensor]:
        if (key := repr(graph)) not in done:
            done[key] = both(comfyui, graph)[:2]
        return done[key]

    return get


def assert_same(server: ComfyUI, graph: Graph, expected: tuple[Tensor, Tensor], way: str = "loop") -> None:
    video, sound, how = both(server, graph)
    assert how == [way]
    assert relative_error(video, expected[0]) <= TOLERANCE
    assert relative_error(sound, expected[1]) <= TOLERANCE


@pytest.mark.parametrize(
    "plan", [SOUND_PLANS[0], SOUND_PLANS[1], *(pytest.param(p, marks=thorough) for p in SOUND_PLANS[2:])]
)
@pytest.mark.parametrize("name", ["minimax", "ltxav"])
def test_video_and_sound(name: str, plan: dict[str, Any], comfyui: ComfyUI, stock: Any) -> None:
    graph = sound_graph(name)
    assert_same(comfyui, spread(graph, **plan), stock(graph))


@pytest.mark.parametrize("name", ["minimax", pytest.param("ltxav", marks=thorough)])
def test_one_forward_at_a_time(name: str, comfyui: ComfyUI, stock: Any) -> None:
    graph = step_by_step(sound_graph(name, steps=2))
    video, sound, (way,) = both(comfyui, spread(graph, strict=False))
    assert way == UNKNOWN_WRAPPER
    for found, expected in zip((video, sound), stock(graph), strict=True):
        assert relative_error(found, expected) <= TOLERANCE


def test_a_node_that_only_the_model_reads(comfyui: ComfyUI, stock: Any) -> None:
    """How the sound's schedule is derived from the video's."""
    plain = sound_graph("minimax", steps=2)
    graph = insert_after_model(plain, "MiniMaxH3SigmaShift", shift_video=9.0, shift_audio=5.0)
    expected = stock(graph)
    assert relative_error(stock(insert_after_model(plain, "ModelSamplingSD3", shift=9.0))[1], expected[1]) > DIFFERENT
    assert_same(comfyui, spread(graph, **PLANS[0]), expected)


@pytest.mark.parametrize("plan", [PLANS[0], pytest.param(SOUND_PLANS[3], marks=thorough)])
def test_first_frame_by_a_mask(plan: dict[str, Any], comfyui: ComfyUI, stock: Any) -> None:
    """LTX-2: each frame of the video has a timestep of its own, the sound has one."""
    plain = sound_graph("ltxav", steps=2)
    graph = masked(plain, 4, 5, 3, of="video")
    expected = stock(graph)
    assert relative_error(stock(plain)[0], expected[0]) > DIFFERENT
    assert_same(comfyui, spread(graph, **plan), expected)


GUIDES: dict[str, dict[str, Any]] = {
    "whole": {},
    "weak": {"strength": 0.7},
    "masked": {"attention_mask": ["half", 0]},
    "strong": {"strength": 1.5, "attention_mask": ["half", 0]},
}


@thorough
@pytest.mark.parametrize("plan", SOUND_PLANS)
@pytest.mark.parametrize("guide", GUIDES)
def test_guides(guide: str, plan: dict[str, Any], comfyui: ComfyUI, stock: Any) -> None:
    """LTX-2's: strength and mask of a guide weigh attention between its tokens and the video's."""
    graph = guided("ltxav", comfyui, guide)
    expected = stock(graph)
    if guide != "whole":
        assert relative_error(stock(guided("ltxav", comfyui, "whole"))[0], expected[0]) > MATTERS
    assert_same(comfyui, spread(graph, **plan), expected)


def guided(name: str, server: ComfyUI, guide: str) -> Graph:
    half = {
        "none": node("SolidMask", value=0.0, width=128, height=160),
        "some": node("SolidMask", value=0.6, width=64, height=160),
        "half": node("MaskComposite", destination=["none", 0], source=["some", 0], x=0, y=0, operation="add"),
    }
    return with_guides(server, sound_graph(name, steps=2) | half, "video", **GUIDES[guide])


def packed(video: str, sound: str) -> Any:
    return node("LTXVConcatAVLatent", video_latent=[video, 0], audio_latent=[sound, 0])


@pytest.mark.parametrize(
    ("name", "latent", "said"),
    [
        ("minimax", node("LoadLatent", latent="silent.latent"), "holds a video alone"),
        ("minimax", packed("two", "two sounds"), "makes one video at a time"),
        ("ltxav", packed("video", "video"), "takes [batch, 8, length, 16]"),
        ("wan", packed("wan", "sound"), "takes [batch, 16, frames, height, width]"),
    ],
)
def test_other_latents_are_refused(comfyui: ComfyUI, name: str, latent: Any, said: str) -> None:
    save_families(comfyui, "wan")
    shapes = {"silent": (1, 24, 2, 4, 4), "two": (2, 24, 2, 4, 4), "two sounds": (2, 32, 2, 9)}
    for file, shape in shapes.items():
        save_latent(comfyui, file, *shape)
    graph = sound_graph("ltxav") | {file: node("LoadLatent", latent=f"{file}.latent") for file in shapes}
    loaders = {key: graph_of(name)[key] for key in ("model", "positive", "negative")}
    graph |= {**loaders, "wan": graph_of("wan")["latent"], "latent": latent}
    assert said in refused(comfyui, spread(graph))
