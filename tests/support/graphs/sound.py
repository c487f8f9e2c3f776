"""Graphs of videos with sound, and the two latents that they save."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from scripts.comfyui import ComfyUI
from tests.support.graphs.comfyui import (
    TOLERANCE,
    graph_of,
)
from tests.support.graphs.flux import (
    Graph,
    node,
    queue_logged,
    ways,
)
from tests.support.latents import relative_error, saved_latent


def sound_graph(name: str, **settings: Any) -> Graph:
    """Return the stock graph. The nodes "save" and "save sound" write the two latents."""
    graph = graph_of(name, **settings) | {
        "apart": node("LTXVSeparateAVLatent", av_latent=["sampler", 0]),
        "save": node("SaveLatent", samples=["apart", 0], filename_prefix="video"),
        "save sound": node("SaveLatent", samples=["apart", 1], filename_prefix="sound"),
    }
    if name.startswith("ltxav"):
        graph["video"] = node("EmptyLTXVLatentVideo", width=128, height=160, length=17, batch_size=1)
        graph["sound"] = node("LoadLatent", latent="ltxav-sound.latent")
    return graph


def both(server: ComfyUI, graph: Graph) -> tuple[Tensor, Tensor, list[str]]:
    """Run a graph. Return the latents of the video and of the sound, and the way each denoise ran (`ways`)."""
    run, log = queue_logged(server, graph)
    run.check()
    return saved_latent(server, run), saved_latent(server, run, "save sound"), ways(log)


def assert_same(server: ComfyUI, graph: Graph, expected: tuple[Tensor, Tensor], way: str = "loop") -> None:
    *found, how = both(server, graph)
    assert how == [way]
    errors = [relative_error(latent, stock) for latent, stock in zip(found, expected, strict=True)]
    print("off by {:.1e} and {:.1e}".format(*errors))
    assert max(errors) <= TOLERANCE


SHOWN: Mapping[str, tuple[str, dict[str, Any]]] = {
    "references with sound": (
        "MiniMaxH3ReferenceToVideo",
        {
            "audio_vae": ["encoders", 2],
            "ref_image_size": "match",
            "ref_images.ref_image_0": ["picture", 0],
            "ref_videos.ref_video_0": ["shot", 0],
            "ref_video_audios.ref_video_audio_0": ["noise", 0],
            "ref_videos.ref_video_1": ["silent shot", 0],
            "ref_audios.ref_audio_0": ["voice", 0],
        },
    ),
    "sound alone": (
        "MiniMaxH3ReferenceToVideo",
        {"audio_vae": ["encoders", 2], "ref_image_size": "match", "ref_audios.ref_audio_0": ["voice", 0]},
    ),
    "last frame": ("MiniMaxH3ImageToVideo", {"last_frame": ["picture", 0]}),
    "first and last frame": (
        "MiniMaxH3ImageToVideo",
        {"first_frame": ["other picture", 0], "last_frame": ["picture", 0]},
    ),
}
"""Nodes of ComfyUI that put content before MiniMax-H3's video, with their inputs."""


def shown(what: str, **settings: Any) -> Graph:
    """Return a graph with one of `SHOWN` on the positive prompt."""
    graph = sound_graph("minimax", **{"steps": 2} | settings)
    class_type, inputs = SHOWN[what]
    size = {"width": 96, "height": 128, "length": 22}
    links = {"clip": ["encoders", 0], "vae": ["encoders", 1]}
    graph["sampler"]["inputs"] |= {"positive": ["shown", 0], "latent_image": ["shown", 1]}
    return graph | {
        "encoders": node("PackEncoders", conditioning=["positive", 0]),
        "shown": node(class_type, **links, **size, prompt="", **inputs),
        "picture": node("EmptyImage", width=64, height=96, batch_size=1, color=0xC04020),
        "other picture": node("EmptyImage", width=64, height=96, batch_size=1, color=0x2040C0),
        "shot": node("EmptyImage", width=64, height=32, batch_size=6, color=0x2040C0),
        "silent shot": node("EmptyImage", width=32, height=64, batch_size=22, color=0x40C020),
        "noise": node("EmptyAudio", duration=0.1, sample_rate=16000, channels=2),
        "voice": node("EmptyAudio", duration=0.2, sample_rate=16000, channels=2),
    }
