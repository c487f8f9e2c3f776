"""Graphs of ComfyUI's own models, by the stock loader and by Load Parallel Diffusion Model, and the files they name."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from scripts.comfyui import ComfyUI
from tests.support.graphs.flux import Graph, insert_after, node
from tests.support.tiny.comfyui import TINY, save_tiny
from tests.support.tiny.models import draw
from tests.vae.comfy_vaes import save_comfy_vae

TOLERANCE = 1e-5
DIFFERENT = 1e-3
"""Smallest relative difference by which a setting that must matter has to change the picture."""

TOKENS = {"positive": 7, "negative": 4}
FLUX1 = "tiny-schnell"

LATENTS = {
    FLUX1: node("EmptyLatentImage", width=72, height=104, batch_size=1),
    "flux2": node("EmptyFlux2LatentImage", width=112, height=80, batch_size=1),
    "wan": node("EmptyHunyuanLatentVideo", width=80, height=72, length=9, batch_size=1),
    "vace": node("EmptyHunyuanLatentVideo", width=80, height=64, length=9, batch_size=1),  # VACE takes no odd latent
    "scail": node("EmptyHunyuanLatentVideo", width=80, height=64, length=9, batch_size=1),
    "s2v": node("EmptyHunyuanLatentVideo", width=80, height=64, length=9, batch_size=1),
    "dancer": node("EmptyHunyuanLatentVideo", width=96, height=64, length=9, batch_size=1),
    "wan_i2v": node("EmptyHunyuanLatentVideo", width=80, height=72, length=9, batch_size=1),
    "wan_talk": node("EmptyHunyuanLatentVideo", width=80, height=80, length=9, batch_size=1),
    "wan22_5b": node("LoadLatent", latent="wan22_5b.latent"),
    "ltxv": node("EmptyLTXVLatentVideo", width=160, height=128, length=17, batch_size=1),
    "hunyuan15": node("EmptyHunyuanVideo15Latent", width=80, height=64, length=9, batch_size=1),
    "meanflow": node("EmptyHunyuanVideo15Latent", width=80, height=64, length=9, batch_size=1),
    **dict.fromkeys(("minimax", "minimax_curves"), node("EmptyMiniMaxH3LatentAV", width=96, height=128, length=22)),
    **dict.fromkeys(
        ("ltxav", "ltxav23"), node("LTXVConcatAVLatent", video_latent=["video", 0], audio_latent=["sound", 0])
    ),
}

PLANS: list[dict[str, Any]] = [
    {"devices": "cpu:2", "cfg": 1, "ulysses": 2},
    {"devices": "cpu:2", "pipefusion": 2, "warmup_steps": 99},
    {"devices": "cpu:2", "ring": 2, "weights": "sharded"},
]

BY_STORE: dict[str, dict[str, Any]] = {
    "ulysses": PLANS[0],
    "stages": PLANS[1],
    "sharded": PLANS[0] | {"weights": "sharded"},
    "streamed": PLANS[0] | {"weights": "streamed"},
}
"""A plan for each way in which ranks hold weights."""

EVERY_SPLIT: Mapping[str, dict[str, Any]] = {
    "ulysses 2": {"devices": "cpu:2", "ulysses": 2},
    "ring 3": {"devices": "cpu:3", "ring": 3},
    "ulysses 2, ring 2": {"devices": "cpu:4", "ulysses": 2, "ring": 2},
    "cfg 2": {"devices": "cpu:2", "cfg": 2},
    "pipefusion 2": {"devices": "cpu:2", "pipefusion": 2, "warmup_steps": 99},
    "sharded": {"devices": "cpu:2", "weights": "sharded"},
}

LatentOf = Callable[[Graph], Tensor]


def save_families(server: ComfyUI, *names: str) -> None:
    """Write the models and the prompts of these families."""
    for name in names:
        save_tiny(server.base_dir / "models" / "diffusion_models", name)
        for side, tokens in TOKENS.items():
            [(cond, options)] = TINY[name].prompt(tokens, seed=tokens)
            save_file({"cond": cond, **options}, server.input_dir / f"{name}-{side}.safetensors")


def save_latent(server: ComfyUI, name: str, *shape: int) -> None:
    """Write a latent file for LoadLatent."""
    tensors = {"latent_tensor": draw(*shape, seed=len(name)), "latent_format_version_0": torch.tensor([])}
    save_file(tensors, server.input_dir / f"{name}.latent")


def graph_of(name: str, **settings: Any) -> Graph:
    """Return a graph with the stock loader and KSampler. The node "save" saves the latent."""
    sampler = {
        "sampler_name": "euler",
        "scheduler": "simple",
        "seed": 7,
        "steps": 3,
        "cfg": 2.5,
        "denoise": 1.0,
    } | settings
    return {
        "model": node("UNETLoader", unet_name=f"{name}.safetensors", weight_dtype="default"),
        **{side: node("LoadConditioning", conditioning=f"{name}-{side}.safetensors") for side in TOKENS},
        "latent": copy.deepcopy(LATENTS.get(name)) or node("LoadLatent", latent=f"{name}.latent"),
        "sampler": node(
            "KSampler",
            model=["model", 0],
            positive=["positive", 0],
            negative=["negative", 0],
            latent_image=["latent", 0],
            **sampler,
        ),
        "save": node("SaveLatent", samples=["sampler", 0], filename_prefix="family"),
    }  # fmt: skip


def spread(graph: Graph, devices: str = "cpu:2", *, strict: bool = True, **plan: Any) -> Graph:
    """Return the graph with Load Parallel Diffusion Model.

    Unless `strict` is false, Parallel Sampler replaces the KSampler: it refuses a run outside of the workers' loop.
    """
    plan = {"devices": devices, "cfg": 0, "ulysses": 0, "ring": 0, "attention": "auto"} | plan
    loader = node("LoadParallelDiffusionModel", **graph["model"]["inputs"], plan=["plan", 0])
    sampler = graph["sampler"]
    if strict:
        sampler = node("ParallelSampler", **sampler["inputs"])
    return graph | {"plan": node("ParallelPlan", **plan), "model": loader, "sampler": sampler}


def with_reference(graph: Graph, file: str, side: str = "positive") -> Graph:
    """Return the graph with one more reference latent on a prompt (`side`)."""
    name = f"{side} with {file}"
    sampler = node(graph["sampler"]["class_type"], **graph["sampler"]["inputs"] | {side: [name, 0]})
    return graph | {
        f"latent {file}": node("LoadLatent", latent=f"{file}.latent"),
        name: node("ReferenceLatent", conditioning=graph["sampler"]["inputs"][side], latent=[f"latent {file}", 0]),
        "sampler": sampler,
    }


def masked(graph: Graph, width: int, height: int, frames: int, of: str = "latent") -> Graph:
    """Return the graph with a mask on the latent of node `of` that keeps its first frame.

    `width` and `height` are in latent pixels, `frames` in latent frames.
    """
    size = {"width": width, "height": height}
    graph = insert_after(graph, of, "SetLatentNoiseMask", "samples", mask=["mask", 0])
    return graph | {
        "first": node("EmptyImage", **size, batch_size=1, color=0),
        "others": node("EmptyImage", **size, batch_size=frames - 1, color=0xFFFFFF),
        "frames": node("ImageBatch", image1=["first", 0], image2=["others", 0]),
        "mask": node("ImageToMask", image=["frames", 0], channel="red"),
    }


def with_guides(server: ComfyUI, graph: Graph, video: str, **last: Any) -> Graph:
    """Return the graph with LTXVAddGuide pictures at the start and the end of a video latent.

    `last` overrides inputs of the node that adds the last picture.
    """
    save_comfy_vae(server.base_dir / "models" / "vae" / "guides-vae.safetensors", "ltx2")
    graph = copy.deepcopy(graph) | {
        "vae": node("VAELoader", vae_name="guides-vae.safetensors"),
        "red": node("EmptyImage", width=64, height=64, batch_size=1, color=0xC04020),
        "blue": node("EmptyImage", width=64, height=64, batch_size=1, color=0x2040C0),
    }
    for other in graph.values():
        other["inputs"] |= {key: ["end", 2] for key, value in other["inputs"].items() if value == [video, 0]}
    sides = {side: graph["sampler"]["inputs"][side] for side in TOKENS}
    graph["sampler"]["inputs"] |= {"positive": ["end", 0], "negative": ["end", 1]}
    first = {**sides, "latent": [video, 0], "image": ["red", 0], "frame_idx": 0, "strength": 1.0}
    second = {"positive": ["begin", 0], "negative": ["begin", 1], "latent": ["begin", 2], "image": ["blue", 0]}
    graph["begin"] = node("LTXVAddGuide", vae=["vae", 0], **first)
    graph["end"] = node("LTXVAddGuide", vae=["vae", 0], **second | {"frame_idx": -1, "strength": 1.0} | last)
    return graph


def with_tensors(server: ComfyUI, graph: Graph, name: str, tensors: Mapping[str, Tensor]) -> Graph:
    """Return the graph with these tensors on both prompts, in place of nodes that need a VAE or a vision model."""
    save_file(dict(tensors), server.input_dir / f"{name}-given.safetensors")
    for side in TOKENS:
        graph = insert_after(graph, side, "PackPrompt", "conditioning", file=f"{name}-given.safetensors")
    return graph
