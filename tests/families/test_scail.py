"""SCAIL and SCAIL 2 through a real ComfyUI against its own loader: each split, a LoRA, poses after the video, and persons."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch

from scripts.comfyui import ComfyUI
from tests.support.graphs.comfyui import (
    PLANS,
    LatentOf,
    graph_of,
    save_families,
    save_latent,
    with_reference,
    with_tensors,
)
from tests.support.graphs.family_checks import assert_matters_and_stock, one_quick
from tests.support.graphs.family_tests import FamiliesGiven, Given
from tests.support.graphs.videos import PERSON, SEEN
from tests.support.tiny.families.wan import LAYERS
from tests.support.tiny.models import draw

GIVEN = {"pose_video_latent": draw(1, 16, 3, 4, 5, seed=41), "clip_vision_output": draw(1, 5, 1280, seed=42)}
PERSONS = {
    "pose_video_latent": draw(1, 16, 3, 4, 5, seed=27),
    "driving_mask_28ch": draw(1, 3, 28, 4, 5, seed=29).gt(0).float(),
    "ref_mask_28ch": (draw(1, 4, 28, 8, 10, seed=32).gt(0) & (torch.arange(4) < 1).view(1, 4, 1, 1, 1)).float(),
}


@pytest.fixture(scope="module", autouse=True)
def _files(comfyui: ComfyUI) -> None:
    save_families(comfyui, "scail")
    save_latent(comfyui, "person", 1, *PERSON[0])


class TestVideos(FamiliesGiven):
    layers: ClassVar = {"scail2": LAYERS, "scail": LAYERS}
    given: ClassVar = {
        "scail, pose": Given("scail", GIVEN, references=PERSON),
        "scail 2, persons": Given("scail2", PERSONS | SEEN, references=PERSON),
    }


@pytest.mark.parametrize("plan", one_quick(PLANS, 0))  # Wan S2V and WanDancer run the other plans
def test_inputs_by_frame_give_the_stock_latent(plan: dict[str, Any], comfyui: ComfyUI, latent_of: LatentOf) -> None:
    plain = with_reference(graph_of("scail"), "person")
    assert_matters_and_stock(latent_of, plain, with_tensors(comfyui, plain, "scail", GIVEN), **plan)
