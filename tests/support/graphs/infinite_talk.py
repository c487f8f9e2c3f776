"""Graphs of InfiniteTalk, and inputs that it refuses."""

from __future__ import annotations

from typing import Any

from scripts.comfyui import ComfyUI
from tests.support.graphs.comfyui import graph_of, save_families, spread
from tests.support.graphs.flux import Graph, node
from tests.support.tiny.controlnet import save_wan_vae

WIDTH, BLOCKS = 640, 3


def save_talk(server: ComfyUI) -> None:
    """Write the files of the graphs of `talking`."""
    save_families(server, "wan_talk")
    save_wan_vae(server.base_dir / "models" / "vae" / "talk-wan-vae.safetensors")


def talking(**given: Any) -> Graph:
    """Return a graph with speech; an `audio_scale` of 0 turns the speech off.

    The graph has cfg 1, because ComfyUI's network takes one branch only.
    """
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


TWO = {"latent": node("RepeatLatentBatch", samples=["talk", 3], amount=2)}
LONGER = {"latent": node("EmptyHunyuanLatentVideo", width=80, height=80, length=13, batch_size=1)}
REFUSED: list[tuple[Graph, str]] = [
    ({"speech": node("PackSpeech", blocks=2, width=WIDTH)}, "the model patch has 2 blocks and the model 3: choose"),
    ({"speech": node("PackSpeech", blocks=BLOCKS, width=320)}, "the model patch is made for a width of 320 and the"),
    (
        TWO,
        "InfiniteTalk takes one video and one prompt in a model call, and this call has 2: choose batch_size 1 and cfg 1.",
    ),
    (
        LONGER,
        "the speech is for 3 latent frames and the latent has 4: use the latent of WanInfiniteTalkToVideo.",
    ),
]


def not_taken(changed: Graph) -> Graph:
    """Return a parallel graph with another latent or another speech, which InfiniteTalk refuses."""
    graph = talking() | changed
    sampler = graph["sampler"]["inputs"]
    if "latent" in changed:
        sampler |= {"latent_image": ["latent", 0]}
    if changed is LONGER:  # without the latent of the first frames, which has the speech's length
        sampler |= {"positive": ["positive", 0], "negative": ["negative", 0]}
    return spread(graph, strict=False)
