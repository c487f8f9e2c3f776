"""Wan S2V through a real ComfyUI against its own loader: each split, a LoRA, sound between blocks and earlier frames."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest

from scripts.comfyui import ComfyUI
from tests.support.graphs.comfyui import (
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
from tests.support.graphs.family_checks import assert_matters_and_stock, assert_stock, one_quick
from tests.support.graphs.family_tests import FamiliesGiven, Given
from tests.support.graphs.videos import PERSON
from tests.support.latents import relative_error
from tests.support.selection import thorough
from tests.support.tiny.families.wan import LAYERS
from tests.support.tiny.models import draw

GIVEN = {"audio_embed": draw(1, 25, 1024, 12, seed=43), "control_video": draw(1, 16, 3, 8, 10, seed=44)}


@pytest.fixture(scope="module", autouse=True)
def _files(comfyui: ComfyUI) -> None:
    save_families(comfyui, "s2v")
    save_latent(comfyui, "person", 1, *PERSON[0])


class TestVideos(FamiliesGiven):
    layers: ClassVar = {"s2v": LAYERS}
    given: ClassVar = {
        "s2v, sound": Given("s2v", GIVEN, references=PERSON),
        "s2v, what came before": Given(
            "s2v", {**GIVEN, "reference_motion": draw(1, 16, 19, 8, 10, seed=38)}, references=PERSON
        ),
        "s2v, longer sound": Given("s2v", {**GIVEN, "audio_embed": draw(1, 25, 1024, 17, seed=43)}),
        "s2v, shorter sound": Given("s2v", {**GIVEN, "audio_embed": draw(1, 25, 1024, 7, seed=43)}),
    }


@pytest.mark.parametrize("plan", one_quick(PLANS, 1))  # SCAIL and WanDancer run the other plans
def test_inputs_by_frame_give_the_stock_latent(plan: dict[str, Any], comfyui: ComfyUI, latent_of: LatentOf) -> None:
    plain = with_reference(graph_of("s2v"), "person")
    assert_matters_and_stock(latent_of, plain, with_tensors(comfyui, plain, "s2v", GIVEN), **plan)


@thorough
@pytest.mark.parametrize("plan", PLANS)
def test_missing_sound_gives_the_stock_result(plan: dict[str, Any], latent_of: LatentOf) -> None:
    """ComfyUI also accepts a prompt without sound."""
    assert_stock(latent_of, graph_of("s2v"), **plan)


@thorough
def test_sound_that_is_too_short_is_refused_where_frames_are_divided(comfyui: ComfyUI, latent_of: LatentOf) -> None:
    graph = with_tensors(comfyui, graph_of("s2v"), "s2v-short", {"audio_embed": draw(1, 25, 1024, 5, seed=48)})
    for plan in (PLANS[0], PLANS[2]):
        run = comfyui.queue(spread(graph, **plan), timeout=300)
        assert run.error is not None
        assert run.error.exception_message.strip() == (
            "audio_emb of the model's AudioInjector_WAN has 2 entries for 3 parts of the latent, which is not "
            "supported with a parallel MODEL: remove the node that sets it, or use Load Diffusion Model."
        )
    # PipeFusion keeps all frames together here
    assert relative_error(latent_of(spread(graph, **PLANS[1])), latent_of(graph)) <= TOLERANCE
