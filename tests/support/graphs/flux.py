"""Graphs in ComfyUI's API format: the same job with ComfyUI's own loader or with Load Parallel FLUX."""

from __future__ import annotations

import copy
import re
from typing import Any

from scripts.comfyui import ComfyUI, QueuedRun

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


def unplanned(graph: Graph, **settings: str) -> Graph:
    """The same graph with the loader swapped, no plan, and what the page fills in of its settings."""
    graph = copy.deepcopy(graph)
    graph["model"]["class_type"] = "LoadParallelFlux"
    graph["model"]["inputs"] |= settings
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


UNKNOWN_WRAPPER = "the predict_noise wrapper unnamed"
"""Why `step_by_step` graphs are not run by the workers' loop."""


def step_by_step(graph: Graph) -> Graph:
    """The graph with a node that changes nothing and that the workers' loop does not know: the cfg it has, once more."""
    cfg = graph["sampler"]["inputs"]["cfg"]
    return insert_after_model(graph, "CFGOverride", cfg=cfg, start_percent=0.0, end_percent=1.0)


def insert_after(graph: Graph, source: str, class_type: str, input_name: str, **inputs: Any) -> Graph:
    """The graph with a node put between the node `source` and all that takes its first output."""
    graph = copy.deepcopy(graph)
    name = f"{class_type} after {source}"
    for other in graph.values():
        for key, value in other["inputs"].items():
            if value == [source, 0]:
                other["inputs"][key] = [name, 0]
    graph[name] = node(class_type, **{input_name: [source, 0]}, **inputs)
    return graph


def controlled(graph: Graph, *, strength: float = 1.0, start: float = 0.0, end: float = 1.0, net: str = "net") -> Graph:
    """The graph with the stock Apply ControlNet behind its prompts; it has the nodes `net` and "image"."""
    graph = copy.deepcopy(graph)
    prompts = {side: graph["sampler"]["inputs"][side] for side in ("positive", "negative")}
    name = f"control by {net}"
    graph["sampler"]["inputs"] |= {"positive": [name, 0], "negative": [name, 1]}
    graph[name] = node(
        "ControlNetApplyAdvanced",
        **prompts,
        control_net=[net, 0],
        image=["image", 0],
        strength=strength,
        start_percent=start,
        end_percent=end,
    )
    return graph


def queue_logged(server: ComfyUI, graph: Graph, timeout: float = 300) -> tuple[QueuedRun, str]:
    """Queue a graph; returns the run and what the server logged meanwhile."""
    before = len(server.log)
    run = server.queue(graph, timeout=timeout)
    return run, server.log[before:]


_WAY = re.compile(
    r"Parallel: (?:\w+ in the workers on |slower path: one forward per model call on .*\(choose .* for the fast one\), "
    r"because the workers' loop does not support (.+))"
)


def ways(log: str) -> list[str]:
    """How each denoise in a log ran: "loop", or what kept it out of the workers' loop."""
    return [match[1] or "loop" for match in _WAY.finditer(log)]
