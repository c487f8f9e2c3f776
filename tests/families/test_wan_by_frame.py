"""Models over Wan's blocks through a real ComfyUI: poses behind the video, sound and music between blocks."""

from __future__ import annotations

from typing import Any

import pytest

from scripts.comfyui import ComfyUI
from tests.support.graphs.by_frame import GIVEN
from tests.support.graphs.comfyui import (
    DIFFERENT,
    PLANS,
    TOLERANCE,
    LatentOf,
    graph_of,
    save_families,
    save_latent,
    spread,
    with_reference,
    with_tensors,
)
from tests.support.latents import relative_error
from tests.support.selection import thorough
from tests.support.tiny.models import draw


@pytest.fixture(scope="module", autouse=True)
def _files(comfyui: ComfyUI) -> None:
    save_families(comfyui, *GIVEN)
    save_latent(comfyui, "person", 1, 16, 1, 8, 10)


@pytest.mark.parametrize(
    ("name", "plan"),
    [
        pytest.param(name, plan, marks=() if quick == place else thorough)
        for place, name in enumerate(GIVEN)
        for quick, plan in enumerate(PLANS)
    ],
)
def test_what_goes_by_frame(name: str, plan: dict[str, Any], comfyui: ComfyUI, latent_of: LatentOf) -> None:
    plain = graph_of(name)
    if name != "dancer":
        plain = with_reference(plain, "person")
    graph = with_tensors(comfyui, plain, name, GIVEN[name])
    stock = latent_of(graph)
    assert relative_error(latent_of(plain), stock) > DIFFERENT
    assert relative_error(latent_of(spread(graph, **plan)), stock) <= TOLERANCE


@thorough
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", ["s2v", "dancer"])
def test_sound_that_is_missing(name: str, plan: dict[str, Any], latent_of: LatentOf) -> None:
    """ComfyUI takes it too; test_comfy_more_videos has sound and music of other lengths."""
    assert relative_error(latent_of(spread(graph_of(name), **plan)), latent_of(graph_of(name))) <= TOLERANCE


@thorough
@pytest.mark.parametrize("plan", PLANS)
def test_music_of_one_frame(plan: dict[str, Any], comfyui: ComfyUI, latent_of: LatentOf) -> None:
    graph = with_tensors(comfyui, graph_of("dancer"), "dancer-short", {"audio_embed": draw(1, 1, 35, seed=47)})
    assert relative_error(latent_of(graph_of("dancer")), latent_of(graph)) > DIFFERENT
    assert relative_error(latent_of(spread(graph, **plan)), latent_of(graph)) <= TOLERANCE


@thorough
def test_sound_that_is_too_short_is_refused_where_frames_are_split(comfyui: ComfyUI, latent_of: LatentOf) -> None:
    graph = with_tensors(comfyui, graph_of("s2v"), "s2v-short", {"audio_embed": draw(1, 25, 1024, 5, seed=48)})
    for plan in (PLANS[0], PLANS[2]):
        run = comfyui.queue(spread(graph, **plan), timeout=300)
        assert run.error is not None
        assert (
            "step 1: audio_emb of the model's AudioInjector_WAN has 2 parts for 3 of the latent, which is not supported with a "
            "parallel MODEL: remove the node that sets it, or use Load Diffusion Model." in run.error.exception_message
        )
    assert relative_error(latent_of(spread(graph, **PLANS[1])), latent_of(graph)) <= TOLERANCE  # frames are whole there
