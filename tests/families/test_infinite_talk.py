"""InfiniteTalk: a network next to Wan whose tokens attend to the speech of their frame, of one speaker or two."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from scripts.comfyui import ComfyUI
from tests.support.graphs.comfyui import TOLERANCE, LatentOf, spread
from tests.support.graphs.diffusers import refused
from tests.support.graphs.family_checks import assert_matters_and_stock
from tests.support.graphs.flux import Graph, node
from tests.support.graphs.infinite_talk import BLOCKS, REFUSED, WIDTH, not_taken, save_talk, talking
from tests.support.latents import relative_error
from tests.support.selection import thorough

PLANS: dict[str, dict[str, Any]] = {
    "ulysses 2": {"devices": "cpu:2", "cfg": 1, "ulysses": 2},
    "ring 3, sharded": {"devices": "cpu:3", "ring": 3, "weights": "sharded"},
    "ulysses 2 x ring 2": {"devices": "cpu:4", "cfg": 1, "ulysses": 2, "ring": 2},
    "pp 2": {"devices": "cpu:2", "cfg": 1, "pipefusion": 2, "warmup_steps": 99},
}
SOME = ["ulysses 2", *(pytest.param(plan, marks=thorough) for plan in [*PLANS][1:])]


@pytest.fixture(scope="module", autouse=True)
def _files(comfyui: ComfyUI) -> None:
    save_talk(comfyui)


def two_speakers(**given: Any) -> Graph:
    """Return a graph in which the left half of the picture speaks first, and the right half afterwards."""
    graph = talking(**given) | {
        "second": node("PackSpeech", blocks=BLOCKS, width=WIDTH),
        "half": node("SolidMask", value=1.0, width=40, height=80),
        "none": node("SolidMask", value=0.0, width=80, height=80),
        "left": node("MaskComposite", destination=["none", 0], source=["half", 0], x=0, y=0, operation="add"),
        "right": node("MaskComposite", destination=["none", 0], source=["half", 0], x=40, y=0, operation="add"),
    }
    graph["talk"]["inputs"] |= {
        "mode": "two_speakers", "mode.audio_encoder_output_2": ["second", 1], "mode.mask_1": ["left", 0],
        "mode.mask_2": ["right", 0],
    }  # fmt: skip
    return graph


@pytest.mark.parametrize("plan", SOME)
@pytest.mark.parametrize(
    "speakers", [pytest.param(talking, marks=thorough), two_speakers]
)  # two have the speech of one
def test_speakers_give_the_stock_latent(latent_of: LatentOf, plan: str, speakers: Callable[..., Graph]) -> None:
    graph = speakers()
    assert_matters_and_stock(latent_of, talking(audio_scale=0.0), graph, strict=False, **PLANS[plan])


@thorough
def test_a_video_that_continues_from_its_last_frames_gives_the_stock_latent(latent_of: LatentOf) -> None:
    graph = talking(previous_frames=["frames", 0]) | {
        "frames": node("EmptyImage", width=80, height=80, batch_size=9, color=0x804020),
    }
    graph["talk"]["inputs"]["motion_frame_count"] = 5
    stock = latent_of(graph)
    assert relative_error(latent_of(spread(graph, strict=False)), stock) <= TOLERANCE


@pytest.mark.parametrize(("changed", "said"), REFUSED)
def test_unsupported_inputs_of_infinite_talk_are_refused(comfyui: ComfyUI, changed: Graph, said: str) -> None:
    assert refused(comfyui, not_taken(changed)).startswith(said)
