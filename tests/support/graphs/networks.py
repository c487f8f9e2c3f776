"""Graphs with networks that run next to a model's blocks."""

from __future__ import annotations

from typing import Any

from safetensors.torch import save_file

from scripts.comfyui import ComfyUI
from tests.support.graphs.comfyui import graph_of, spread
from tests.support.graphs.flux import Graph, insert_after_model, node
from tests.support.server import save_picture
from tests.support.tiny.comfyui import save_tiny
from tests.support.tiny.models import draw
from tests.support.tiny.networks import save_lllite

ANIMA = "anima"

NETWORK_PLANS: dict[str, dict[str, Any]] = {
    "ulysses 2": {"devices": "cpu:2", "cfg": 1, "ulysses": 2},
    "cfg 2": {"devices": "cpu:2", "cfg": 2},
    "ulysses 2 x ring 2": {"devices": "cpu:4", "cfg": 1, "ulysses": 2, "ring": 2},
    "pp 2": {"devices": "cpu:2", "cfg": 1, "pipefusion": 2, "warmup_steps": 99},
}
"""Plans for a model with a network next to its blocks, or with a ControlNet."""


def anima_graphs(server: ComfyUI) -> tuple[Graph, Graph]:
    """Return two graphs: with two LLLite networks, and without.

    One network ends before the last step, and the other takes a mask.
    """
    models = server.base_dir / "models"
    save_tiny(models / "diffusion_models", ANIMA)
    save_lllite(models / "model_patches" / "lllite.safetensors")
    save_lllite(models / "model_patches" / "lllite-masked.safetensors", masked=True, seed=1)
    save_lllite(models / "model_patches" / "lllite-narrow.safetensors", width=128)
    save_picture(server, "beside.png", (112, 72), (9, 14))
    graph = graph_of("wan") | {"latent": node("EmptyHunyuanLatentVideo", width=112, height=72, length=1, batch_size=1)}
    graph["model"]["inputs"]["unet_name"] = f"{ANIMA}.safetensors"
    for tokens, side in ((7, "positive"), (4, "negative")):
        save_file({"cond": draw(1, tokens, 1024, seed=tokens)}, server.input_dir / f"{ANIMA}-{side}.safetensors")
        graph[side]["inputs"]["conditioning"] = f"{ANIMA}-{side}.safetensors"
    graph |= {
        "image": node("LoadImage", image="beside.png"),
        "mask": node("ImageToMask", image=["image", 0], channel="red"),
    }
    patched = graph
    changes: dict[str, dict[str, Any]] = {"lllite": {"end_percent": 0.6}, "lllite-masked": {"mask": ["mask", 0]}}
    for name, given in changes.items():
        settings = {"strength": 0.8, "start_percent": 0.0, "end_percent": 1.0} | given
        patched = insert_after_model(
            patched, "AnimaLLLiteApply", model_patch=[name, 0], image=["image", 0], **settings
        ) | {name: node("ModelPatchLoader", name=f"{name}.safetensors")}
    return patched, graph


CHANGED: tuple[tuple[Graph, str], ...] = (
    (
        {"latent": node("EmptyHunyuanLatentVideo", width=112, height=72, length=9, batch_size=1)},
        "Anima LLLite takes a picture and the latent has 3 frames: use a latent of one frame.",
    ),
    (
        {"image": node("RepeatImageBatch", image=["first", 0], amount=2)},
        "the model patch has a batch of 2 pictures and a parallel MODEL takes one: ",
    ),
    (
        {"lllite": node("ModelPatchLoader", name="lllite-narrow.safetensors")},
        "the model patch is made for a width of 128 and the model has 256: ",
    ),
    (
        {"lllite": node("PackChangedPatch", model_patch=["unchanged", 0])},
        "a model patch that another node has changed cannot be applied to a parallel MODEL: ",
    ),
)
"""Changes of a graph with networks, each with a part of the message that refuses it."""


def change(patched: Graph, changed: Graph) -> Graph:
    """Return the parallel graph with these changes. The replaced nodes stay under the names "first" and "unchanged"."""
    return spread(patched | {"first": patched["image"], "unchanged": patched["lllite"]} | changed)
