"""Inputs besides text for graphs of ComfyUI's own models."""

from __future__ import annotations

from safetensors.torch import save_file

from scripts.comfyui import ComfyUI
from tests.support.graphs.comfyui import TOKENS, TOLERANCE, graph_of
from tests.support.graphs.flux import Graph, node
from tests.support.tiny.comfyui import TINY, save_tiny

LATENTS = {
    "longcat": node("EmptySD3LatentImage", width=112, height=72, batch_size=1),
    "krea2": node("EmptyHunyuanLatentVideo", width=112, height=72, length=1, batch_size=1),
    "sd3": node("EmptySD3LatentImage", width=112, height=80, batch_size=1),
}


TEXT = {"wide_qwen": 3584, "wide_z_image": 64, "wide_chroma": 4096}
MATTERS = 10 * TOLERANCE
"""Smallest relative difference that masks and references must make. It is small because the models have only one block."""


def graph_with(server: ComfyUI, name: str) -> Graph:
    """Write a model and its prompts, and return its stock graph."""
    save_tiny(server.base_dir / "models" / "diffusion_models", name)
    graph = graph_of("wan") | {"latent": LATENTS[name]}
    graph["model"]["inputs"]["unet_name"] = f"{name}.safetensors"
    for side, tokens in TOKENS.items():
        [(cond, options)] = TINY[name].prompt(tokens, seed=tokens)
        save_file({"cond": cond, **options}, server.input_dir / f"{name}-{side}.safetensors")
        graph[side]["inputs"]["conditioning"] = f"{name}-{side}.safetensors"
    return graph
