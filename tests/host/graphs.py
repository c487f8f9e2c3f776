"""Graphs in ComfyUI's API format: the same job with ComfyUI's own loader or with Load Parallel FLUX."""

from __future__ import annotations

import copy
from typing import Any

Graph = dict[str, Any]


def node(class_type: str, **inputs: Any) -> dict[str, Any]:
    """One node; a link is `["id", output]`."""
    return {"class_type": class_type, "inputs": inputs}


def ksampler_graph(
    model: str,
    *,
    positive: str = "cond-37",
    negative: str = "cond-37-other",
    width: int = 128,
    height: int = 128,
    batch: int = 1,
    seed: int = 7,
    steps: int = 4,
    cfg: float = 1.0,
    sampler: str = "euler",
    scheduler: str = "simple",
    denoise: float = 1.0,
) -> Graph:
    """UNETLoader and KSampler on an empty latent, saved by the node "save"."""
    return {
        "model": node("UNETLoader", unet_name=f"{model}.safetensors", weight_dtype="default"),
        "positive": node("LoadConditioning", conditioning=f"{positive}.safetensors"),
        "negative": node("LoadConditioning", conditioning=f"{negative}.safetensors"),
        "latent": node("EmptyLatentImage", width=width, height=height, batch_size=batch),
        "sampler": node(
            "KSampler",
            model=["model", 0],
            seed=seed,
            steps=steps,
            cfg=cfg,
            sampler_name=sampler,
            scheduler=scheduler,
            positive=["positive", 0],
            negative=["negative", 0],
            latent_image=["latent", 0],
            denoise=denoise,
        ),
        "save": node("SaveLatent", samples=["sampler", 0], filename_prefix="test"),
    }


def parallel(graph: Graph, devices: str = "cpu:2", *, sampler: bool = False, **plan: Any) -> Graph:
    """The same graph with the loader swapped, and the KSampler too if `sampler`."""
    graph = copy.deepcopy(graph)
    graph["plan"] = node("ParallelPlan", **({"devices": devices, "ulysses": 0, "ring": 0, "attention": "auto"} | plan))
    graph["model"]["class_type"] = "LoadParallelFlux"
    graph["model"]["inputs"]["plan"] = ["plan", 0]
    if sampler:
        graph["sampler"]["class_type"] = "ParallelSampler"
    return graph


def insert_after_model(graph: Graph, class_type: str, **inputs: Any) -> Graph:
    """The graph with a MODEL-to-MODEL node put right behind the loader."""
    graph = copy.deepcopy(graph)
    name = f"patch{sum(key.startswith('patch') for key in graph)}"
    for other in graph.values():
        for input_name, value in other["inputs"].items():
            if value == ["model", 0]:
                other["inputs"][input_name] = [name, 0]
    graph[name] = node(class_type, model=["model", 0], **inputs)
    return graph
