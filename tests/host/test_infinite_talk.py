"""InfiniteTalk: a network beside Wan whose tokens attend to the speech of their frame, of one speaker or two."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from scripts.comfyui import ComfyUI
from tests.host.comfy_graphs import DIFFERENT, TOLERANCE, LatentOf, graph_of, save_families, spread
from tests.host.conftest import relative_error
from tests.host.graphs import Graph, node
from tests.host.test_families import refused
from tests.selection import thorough
from tests.tiny_controlnet import save_wan_vae

WIDTH, BLOCKS = 640, 3
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


def save_talk(server: ComfyUI) -> None:
    """The files of `talking`."""
    save_families(server, "wan_talk")
    save_wan_vae(server.base_dir / "models" / "vae" / "talk-wan-vae.safetensors")


def talking(**given: Any) -> Graph:
    """With speech, or without where its strength is 0. At cfg 1, as ComfyUI's network takes one side alone."""
    graph = graph_of("wan_talk", cfg=1.0, steps=2) | {
        "vae": node("VAELoader", vae_name="talk-wan-vae.safetensors"),
        "first": node("EmptyImage", width=80, height=80, batch_size=1, color=0x4080C0),
        "speech": node("PackSpeech", blocks=BLOCKS, width=WIDTH),
    }
    inputs = {
        "mode": "single_speaker", "model": ["model", 0], "model_patch": ["speech", 0], "positive": ["positive", 0],
        "negative": ["negative", 0], "vae": ["vae", 0], "width": 80, "height": 80, "length": 9,
        "start_image": ["first", 0], "audio_encoder_output_1": ["speech", 1], "motion_frame_count": 9, "audio_scale": 1.0,
    }  # fmt: skip
    graph["talk"] = node("WanInfiniteTalkToVideo", **inputs | given)
    sampler = graph["sampler"]["inputs"]
    sampler |= {"model": ["talk", 0], "positive": ["talk", 1], "negative": ["talk", 2], "latent_image": ["talk", 3]}
    return graph


def two_speakers(**given: Any) -> Graph:
    """The left half of the picture speaks first, and the right half then."""
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
@pytest.mark.parametrize("speakers", [talking, two_speakers])
def test_speakers_talk_as_on_the_stock_loader(latent_of: LatentOf, plan: str, speakers: Callable[..., Graph]) -> None:
    graph = speakers()
    stock = latent_of(graph)
    assert relative_error(latent_of(talking(audio_scale=0.0)), stock) > DIFFERENT
    assert relative_error(latent_of(spread(graph, strict=False, **PLANS[plan])), stock) <= TOLERANCE


@thorough
def test_a_video_goes_on_from_its_last_frames(latent_of: LatentOf) -> None:
    graph = talking(previous_frames=["frames", 0]) | {
        "frames": node("EmptyImage", width=80, height=80, batch_size=9, color=0x804020),
    }
    graph["talk"]["inputs"]["motion_frame_count"] = 5
    stock = latent_of(graph)
    assert relative_error(latent_of(spread(graph, strict=False)), stock) <= TOLERANCE


TWO = {"latent": node("RepeatLatentBatch", samples=["talk", 3], amount=2)}
LONGER = {"latent": node("EmptyHunyuanLatentVideo", width=80, height=80, length=13, batch_size=1)}
REFUSED: list[tuple[Graph, str]] = [
    ({"speech": node("PackSpeech", blocks=2, width=WIDTH)}, "the model patch has 2 blocks and the model 3: choose"),
    ({"speech": node("PackSpeech", blocks=BLOCKS, width=320)}, "the model patch is made for a width of 320 and the"),
    (
        TWO,
        "InfiniteTalk takes one video and one prompt in a model call, and this one has 2: choose batch_size 1 and cfg 1.",
    ),
    (
        LONGER,
        "the speech is for 3 frames of the latent, which has 4: use the latent that WanInfiniteTalkToVideo gives.",
    ),
]


def not_taken(changed: Graph) -> Graph:
    """With another latent, or with other speech."""
    graph = talking() | changed
    sampler = graph["sampler"]["inputs"]
    if "latent" in changed:
        sampler |= {"latent_image": ["latent", 0]}
    if changed is LONGER:  # without the first frames' latent, which has the speech's length
        sampler |= {"positive": ["positive", 0], "negative": ["negative", 0]}
    return spread(graph, strict=False)


@pytest.mark.parametrize(("changed", "said"), REFUSED)
def test_what_it_does_not_take_is_refused(comfyui: ComfyUI, changed: Graph, said: str) -> None:
    assert refused(comfyui, not_taken(changed)).startswith(said)
