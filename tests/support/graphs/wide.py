"""Graphs of Qwen-Image, Z-Image and Chroma, whose real width ComfyUI assumes."""

from __future__ import annotations

from typing import Any

import torch
from safetensors.torch import save_file

from scripts.comfyui import ComfyUI
from tests.support.graphs.comfyui import graph_of
from tests.support.graphs.comfyui_inputs import TEXT
from tests.support.graphs.flux import Graph, node
from tests.support.tiny.comfyui import save_wide
from tests.support.tiny.models import draw

TOKENS = 40
SHOWN = {"positive": 25, "negative": 11}
"""Number of the text's tokens that the mask keeps."""

LATENT = node("EmptySD3LatentImage", width=112, height=80, batch_size=1)


def save_wide_with_prompts(server: ComfyUI, name: str) -> None:
    """Write a model and its prompts, with and without a mask."""
    save_wide(server.base_dir / "models" / "diffusion_models", name)
    for seed, (side, shown) in enumerate(SHOWN.items()):
        text = {"cond": draw(1, TOKENS, TEXT[name], seed=seed)}
        save_file(text, server.input_dir / f"{name}-{side}.safetensors")
        masked = text | {"attention_mask": (torch.arange(TOKENS) < shown)[None].long()}
        save_file(masked, server.input_dir / f"{name}-masked-{side}.safetensors")


def wide(name: str, prompts: str = "", **settings: Any) -> Graph:
    """Return the graph of a latent with 35 tokens, which Z-Image pads."""
    graph = graph_of("wan", **{"steps": 2, "seed": 8} | settings) | {"latent": LATENT}
    graph["model"]["inputs"]["unet_name"] = f"{name}.safetensors"
    for side in SHOWN:
        graph[side]["inputs"]["conditioning"] = f"{name}{prompts}-{side}.safetensors"
    return graph
