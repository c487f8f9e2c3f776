"""SCAIL, SCAIL 2, Wan S2V and WanDancer through a real ComfyUI against its own loader, with inputs that belong to frames.

SCAIL has poses after the video's tokens, and persons. Wan S2V has sound between blocks and earlier frames, WanDancer has music.
"""

from __future__ import annotations

from itertools import product
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
    spread,
    with_reference,
    with_tensors,
)
from tests.support.graphs.diffusers import refused
from tests.support.graphs.family_checks import assert_matters_and_stock, assert_stock
from tests.support.graphs.family_tests import Families, Given
from tests.support.graphs.videos import PERSON, SEEN
from tests.support.selection import thorough
from tests.support.tiny.families.wan import LAYERS
from tests.support.tiny.models import draw

POSE = {"pose_video_latent": draw(1, 16, 3, 4, 5, seed=41), "clip_vision_output": draw(1, 5, 1280, seed=42)}
PERSONS = {
    "pose_video_latent": draw(1, 16, 3, 4, 5, seed=27),
    "driving_mask_28ch": draw(1, 3, 28, 4, 5, seed=29).gt(0).float(),
    "ref_mask_28ch": (draw(1, 4, 28, 8, 10, seed=32).gt(0) & (torch.arange(4) < 1).view(1, 4, 1, 1, 1)).float(),
}
SOUND = {"audio_embed": draw(1, 25, 1024, 12, seed=43), "control_video": draw(1, 16, 3, 8, 10, seed=44)}
MUSIC = {"audio_embed": draw(1, 20, 35, seed=45), "clip_vision_output": draw(1, 5, 1280, seed=46)}
SLOWLY = {
    "fps": torch.tensor(7.5),
    "audio_inject_scale": torch.tensor(0.8),
    "clip_vision_output_ref": draw(1, 5, 1280, seed=37),
}


@pytest.fixture(scope="module", autouse=True)
def _files(comfyui: ComfyUI) -> None:
    save_families(comfyui, "scail", "s2v", "dancer")
    save_latent(comfyui, "person", 1, *PERSON[0])


class TestVideos(Families):
    layers: ClassVar = dict.fromkeys(("scail", "scail2", "s2v", "dancer"), LAYERS)
    given: ClassVar = {
        "scail, pose": Given("scail", POSE, references=PERSON),
        "scail 2, persons": Given("scail2", PERSONS | SEEN, references=PERSON),
        "s2v, sound": Given("s2v", SOUND, references=PERSON),
        "s2v, what came before": Given(
            "s2v", {**SOUND, "reference_motion": draw(1, 16, 19, 8, 10, seed=38)}, references=PERSON
        ),
        "s2v, longer sound": Given("s2v", {**SOUND, "audio_embed": draw(1, 25, 1024, 17, seed=43)}),
        "s2v, shorter sound": Given("s2v", {**SOUND, "audio_embed": draw(1, 25, 1024, 7, seed=43)}),
        "wan dancer, longer music": Given("dancer", {**MUSIC, "audio_embed": draw(1, 33, 35, seed=43)}),
        "wan dancer, shorter music": Given("dancer", {**MUSIC, "audio_embed": draw(1, 7, 35, seed=43)}),
        "wan dancer, music": Given("dancer", MUSIC),
        "wan dancer, all it takes": Given("dancer", {**MUSIC, **SLOWLY}),
    }


@pytest.mark.parametrize(
    ("name", "plan"),
    [  # in the quick run models/test_sequence_parallel has SCAIL, Wan S2V and WanDancer
        pytest.param(name, plan, marks=[thorough] * ((name, plan) != ("s2v", PLANS[1])))
        for name, plan in product(("scail", "s2v", "dancer"), PLANS)
    ],
)
def test_inputs_by_frame_give_the_stock_latent(
    name: str, plan: dict[str, Any], comfyui: ComfyUI, latent_of: LatentOf
) -> None:
    plain = graph_of(name) if name == "dancer" else with_reference(graph_of(name), "person")
    given = {"scail": POSE, "s2v": SOUND, "dancer": MUSIC}[name]
    assert_matters_and_stock(latent_of, plain, with_tensors(comfyui, plain, name, given), **plan)


@thorough
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", ["s2v", "dancer"])
def test_missing_sound_gives_the_stock_result(name: str, plan: dict[str, Any], latent_of: LatentOf) -> None:
    """ComfyUI also accepts a prompt without sound."""
    assert_stock(latent_of, graph_of(name), **plan)


@thorough
@pytest.mark.parametrize("plan", PLANS)
def test_music_of_one_frame_gives_the_stock_result(plan: dict[str, Any], comfyui: ComfyUI, latent_of: LatentOf) -> None:
    plain = graph_of("dancer")
    graph = with_tensors(comfyui, plain, "dancer-short", {"audio_embed": draw(1, 1, 35, seed=47)})
    assert_matters_and_stock(latent_of, plain, graph, **plan)


@thorough
def test_sound_that_is_too_short_is_refused_where_frames_are_divided(comfyui: ComfyUI, latent_of: LatentOf) -> None:
    graph = with_tensors(comfyui, graph_of("s2v"), "s2v-short", {"audio_embed": draw(1, 25, 1024, 5, seed=48)})
    for plan in (PLANS[0], PLANS[2]):
        assert refused(comfyui, spread(graph, **plan)) == (
            "audio_emb of the model's AudioInjector_WAN has 2 entries for 3 parts of the latent, which is not "
            "supported with a parallel MODEL: remove the node that sets it, or use Load Diffusion Model."
        )
    # PipeFusion keeps all frames together here
    assert_stock(latent_of, graph, **PLANS[1])
