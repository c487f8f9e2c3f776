"""WanDancer through a real ComfyUI against its own loader: each split, a LoRA, music between blocks."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch

from scripts.comfyui import ComfyUI
from tests.support.graphs.comfyui import PLANS, LatentOf, graph_of, save_families, with_tensors
from tests.support.graphs.family_checks import assert_matters_and_stock, assert_stock, one_quick
from tests.support.graphs.family_tests import FamiliesGiven, Given
from tests.support.selection import thorough
from tests.support.tiny.families.wan import LAYERS
from tests.support.tiny.models import draw

GIVEN = {"audio_embed": draw(1, 20, 35, seed=45), "clip_vision_output": draw(1, 5, 1280, seed=46)}
SLOWLY = {
    "fps": torch.tensor(7.5),
    "audio_inject_scale": torch.tensor(0.8),
    "clip_vision_output_ref": draw(1, 5, 1280, seed=37),
}


@pytest.fixture(scope="module", autouse=True)
def _files(comfyui: ComfyUI) -> None:
    save_families(comfyui, "dancer")


class TestVideos(FamiliesGiven):
    layers: ClassVar = {"dancer": LAYERS}
    given: ClassVar = {
        "wan dancer, longer music": Given("dancer", {**GIVEN, "audio_embed": draw(1, 33, 35, seed=43)}),
        "wan dancer, shorter music": Given("dancer", {**GIVEN, "audio_embed": draw(1, 7, 35, seed=43)}),
        "wan dancer, music": Given("dancer", GIVEN),
        "wan dancer, all it takes": Given("dancer", {**GIVEN, **SLOWLY}),
    }


@pytest.mark.parametrize("plan", one_quick(PLANS, 2))  # SCAIL and Wan S2V run the other plans
def test_inputs_by_frame_give_the_stock_latent(plan: dict[str, Any], comfyui: ComfyUI, latent_of: LatentOf) -> None:
    plain = graph_of("dancer")
    assert_matters_and_stock(latent_of, plain, with_tensors(comfyui, plain, "dancer", GIVEN), **plan)


@thorough
@pytest.mark.parametrize("plan", PLANS)
def test_missing_sound_gives_the_stock_result(plan: dict[str, Any], latent_of: LatentOf) -> None:
    """ComfyUI also accepts a prompt without sound."""
    assert_stock(latent_of, graph_of("dancer"), **plan)


@thorough
@pytest.mark.parametrize("plan", PLANS)
def test_music_of_one_frame_gives_the_stock_result(plan: dict[str, Any], comfyui: ComfyUI, latent_of: LatentOf) -> None:
    plain = graph_of("dancer")
    graph = with_tensors(comfyui, plain, "dancer-short", {"audio_embed": draw(1, 1, 35, seed=47)})
    assert_matters_and_stock(latent_of, plain, graph, **plan)
