"""Checks that the families of videos with sound share. Both latents are packed in one, and both are compared."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
from torch import Tensor

from scripts.comfyui import ComfyUI
from tests.support.graphs.comfyui import (
    DIFFERENT,
    PLANS,
    TOLERANCE,
    graph_of,
    masked,
    save_families,
    save_latent,
    spread,
)
from tests.support.graphs.diffusers import refused
from tests.support.graphs.flux import UNKNOWN_WRAPPER, Graph, insert_after, node, step_by_step
from tests.support.graphs.loras import with_lora
from tests.support.graphs.sound import assert_same, both, sound_graph
from tests.support.latents import cached_by_graph, relative_error
from tests.support.sampler_names import LOCAL
from tests.support.selection import pairwise

SOUND_PLANS: list[dict[str, Any]] = [
    PLANS[0],
    {"devices": "cpu:3", "ring": 3},
    {"devices": "cpu:2", "cfg": 2, "weights": "sharded"},
    {"devices": "cpu:2", "pipefusion": 2},
    {"devices": "cpu:4", "ulysses": 2, "ring": 2},
]
LORA_PLANS = [SOUND_PLANS[2], SOUND_PLANS[3]]

SPLITS_OR_STAGES: Mapping[str, dict[str, Any]] = {
    "ulysses 2": PLANS[0],
    "cfg 2": {"devices": "cpu:2", "cfg": 2},
    "pipefusion 2": SOUND_PLANS[3],
}

Stock = Callable[[Graph], tuple[Tensor, Tensor]]


def stock_of(server: ComfyUI) -> Stock:
    """Return a function that gives the stock loader's two latents of a graph, cached by graph."""
    return cached_by_graph(lambda graph: both(server, graph)[:2])


def every_sampler(family: str) -> pytest.MarkDecorator:
    """Parametrise a test with a family's pairwise combinations of samplers and splits or stages; `name` is the family."""
    names, cases = pairwise(sampler=LOCAL, name=("minimax", "ltxav"), split=SPLITS_OR_STAGES).args
    return pytest.mark.parametrize(names, [case for case in cases if case.values[1] == family])


def assert_sampler(server: ComfyUI, stock: Stock, name: str, sampler: str, split: Mapping[str, Any]) -> None:
    """Assert the stock result for a sampler, whose noise covers both latents packed in one.

    CFG++ adds the guidance at full weight in each step, and MiniMax-H3's sound is scaled by up to 4. Rounding of 2e-7 in a
    forward therefore grows to 6e-6 at cfg 1.5, the value that CFG++ is made for, and in proportion to cfg.
    """
    cfg = 1.5 if sampler.endswith("cfg_pp") else 2.5
    graph = sound_graph(name, sampler_name=sampler, steps=4, cfg=cfg)
    assert_same(server, spread(graph, **split), stock(graph))


def assert_lora(server: ComfyUI, stock: Stock, name: str, plan: Mapping[str, Any]) -> None:
    """Assert the stock result with a LoRA that changes both video and sound."""
    plain = sound_graph(name, steps=2)
    graph = with_lora(plain, name, 0.8)
    expected = stock(graph)
    for changed, unchanged in zip(expected, stock(plain), strict=True):
        assert relative_error(unchanged, changed) > DIFFERENT
    assert_same(server, spread(graph, **plan), expected)


def assert_one_forward_at_a_time(server: ComfyUI, stock: Stock, name: str) -> None:
    graph = step_by_step(sound_graph(name, steps=2))
    video, sound, (way,) = both(server, spread(graph, strict=False))
    assert way == UNKNOWN_WRAPPER
    for found, expected in zip((video, sound), stock(graph), strict=True):
        assert relative_error(found, expected) <= TOLERANCE


def with_masked_sound(
    server: ComfyUI, name: str, video: tuple[int, ...], sound: tuple[int, ...], *, both_masked: bool
) -> tuple[Graph, Graph]:
    """Return a graph from latents of these shapes, and the same graph with a part of the sound kept.

    If `both_masked`, the second graph also keeps the video's first frame.
    """
    save_latent(server, "kept-video", 1, *video)
    save_latent(server, "kept-sound", 1, *sound)
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
    return plain, graph


def packed(video: str, sound: str) -> Any:
    return node("LTXVConcatAVLatent", video_latent=[video, 0], audio_latent=[sound, 0])


def assert_latent_is_refused(server: ComfyUI, name: str, latent: Any, said: str) -> None:
    """Assert that a latent is refused with the message `said`.

    The latent may link to these nodes of the graph: LTX-2's "video" and "sound", MiniMax-H3's "two" and "two sounds", "silent"
    and "wan".
    """
    save_families(server, name)
    save_latent(server, "ltxav-sound", 1, 8, 11, 16)
    shapes = {"silent": (1, 24, 2, 4, 4), "two": (2, 24, 2, 4, 4), "two sounds": (2, 32, 2, 9)}
    for file, shape in shapes.items():
        save_latent(server, file, *shape)
    graph = sound_graph("ltxav") | {file: node("LoadLatent", latent=f"{file}.latent") for file in shapes}
    loaders = {key: graph_of(name)[key] for key in ("model", "positive", "negative")}
    graph |= {**loaders, "wan": graph_of("wan")["latent"], "latent": latent}
    assert said in refused(server, spread(graph))
