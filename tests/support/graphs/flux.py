"""Graphs in ComfyUI's API format: the same job with ComfyUI's own loader or with Load Parallel FLUX."""

from __future__ import annotations

import copy
import re
from typing import Any

from scripts.comfyui import ComfyUI, QueuedRun

Graph = dict[str, Any]


def node(class_type: str, **inputs: Any) -> dict[str, Any]:
    """Return a node. An input that is a link has the form `["id", output]`."""
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
    """Return a graph with UNETLoader and KSampler on an empty latent. The node "save" saves the latent."""
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
    """Return the graph with Load Parallel FLUX as its loader, and with Parallel Sampler if `sampler`."""
    graph = copy.deepcopy(graph)
    graph["plan"] = node("ParallelPlan", **({"devices": devices, "ulysses": 0, "ring": 0, "attention": "auto"} | plan))
    graph["model"]["class_type"] = "LoadParallelFlux"
    graph["model"]["inputs"]["plan"] = ["plan", 0]
    if sampler:
        graph["sampler"]["class_type"] = "ParallelSampler"
    return graph


def beside(graph: Graph, stock: Graph) -> Graph:
    """Return both graphs in one, so that ComfyUI keeps both models. The names of the second graph's nodes begin with "stock "."""
    names = {name: f"stock {name}" for name in stock}
    renamed = {names[name]: copy.deepcopy(each) for name, each in stock.items()}
    for each in renamed.values():
        links = {key: value for key, value in each["inputs"].items() if isinstance(value, list)}
        each["inputs"] |= {key: [names[source], output] for key, (source, output) in links.items()}
    return graph | renamed


def unplanned(graph: Graph, **settings: str) -> Graph:
    """Return the graph with Load Parallel FLUX as its loader, with no plan, and with settings as the page fills them in."""
    graph = copy.deepcopy(graph)
    graph["model"]["class_type"] = "LoadParallelFlux"
    graph["model"]["inputs"] |= settings
    return graph


def insert_after_model(graph: Graph, class_type: str, **inputs: Any) -> Graph:
    """Return the graph with a MODEL-to-MODEL node directly after the loader."""
    graph = copy.deepcopy(graph)
    name = f"patch{sum(key.startswith('patch') for key in graph)}"
    for other in graph.values():
        for input_name, value in other["inputs"].items():
            if value == ["model", 0]:
                other["inputs"][input_name] = [name, 0]
    graph[name] = node(class_type, model=["model", 0], **inputs)
    return graph


UNKNOWN_WRAPPER = "the predict_noise wrapper unnamed"
"""The reason why `step_by_step` graphs do not run in the workers' loop."""


def step_by_step(graph: Graph) -> Graph:
    """Return the graph with a node that the workers' loop does not know and that changes nothing: the same cfg, set again."""
    cfg = graph["sampler"]["inputs"]["cfg"]
    return insert_after_model(graph, "CFGOverride", cfg=cfg, start_percent=0.0, end_percent=1.0)


def insert_after(graph: Graph, source: str, class_type: str, input_name: str, **inputs: Any) -> Graph:
    """Return the graph with a node between the node `source` and all nodes that take its first output."""
    graph = copy.deepcopy(graph)
    name = f"{class_type} after {source}"
    for other in graph.values():
        for key, value in other["inputs"].items():
            if value == [source, 0]:
                other["inputs"][key] = [name, 0]
    graph[name] = node(class_type, **{input_name: [source, 0]}, **inputs)
    return graph


def controlled(graph: Graph, *, strength: float = 1.0, start: float = 0.0, end: float = 1.0, net: str = "net") -> Graph:
    """Return the graph with the stock Apply ControlNet after its prompts. The caller adds the nodes `net` and "image"."""
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
    """Queue a graph. Return the run and the server's log of it."""
    before = len(server.log)
    run = server.queue(graph, timeout=timeout)
    return run, server.log[before:]


_WAY = re.compile(
    r"Parallel: (?:\w+ in the workers on |slower path: one forward per model call on .*\(choose .* for the fast one\), "
    r"because the workers' loop does not support (.+))"
)


def ways(log: str) -> list[str]:
    """Return for each denoise in a log "loop", or the reason why it did not run in the workers' loop."""
    return [match[1] or "loop" for match in _WAY.finditer(log)]
