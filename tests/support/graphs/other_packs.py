"""Graphs with changes by another pack to a MODEL, a GUIDER or a SAMPLER."""

from __future__ import annotations

from typing import Any

from tests.support.graphs.combined import with_guider
from tests.support.graphs.flux import Graph, insert_after_model, ksampler_graph, node
from tests.support.server import NARROW

SEED = 5100


def basic() -> Graph:
    return ksampler_graph(NARROW, width=64, height=64, steps=2, cfg=2.0, seed=SEED)


def custom(guider: dict[str, Any] | None = None, sampler: dict[str, Any] | None = None) -> Graph:
    """Return a graph with SamplerCustomAdvanced, with the pack's guider or sampler."""
    sides = {"positive": ["positive", 0], "negative": ["negative", 0]}
    return with_guider(basic(), guider or node("CFGGuider", model=["model", 0], **sides, cfg=2.0), sampler)


def changed(kind: str) -> Graph:
    return insert_after_model(basic(), "PackModel", kind=kind)


def changed_by_steps(kind: str) -> Graph:
    """Return a graph that runs one model call at a time, on a MODEL for which some of ComfyUI's answers vary between steps."""
    return insert_after_model(changed(kind), "RescaleCFG", multiplier=0.7)


def guided(kind: str) -> Graph:
    sides = {"positive": ["positive", 0], "negative": ["negative", 0]}
    return custom(guider=node("PackGuider", model=["model", 0], **sides, kind=kind))


def called_back(kind: str, turn: int = 0) -> Graph:
    """Return a graph with a pack's own node that samples with a callback. Another `turn` makes ComfyUI run the node again."""
    graph = basic()
    links = {name: graph["sampler"]["inputs"][name] for name in ("model", "positive", "negative", "latent_image")}
    return graph | {"sampler": node("PackCallback", **links, kind=kind, turn=turn)}


REFUSED = {
    "forward_orig": "Changing diffusion_model.forward_orig",
    "object patch diffusion_model.forward": "Replacing diffusion_model.forward",
    "a hook on a block": "Changing diffusion_model.single_blocks.0.forward",
    "forward on a block": "Changing diffusion_model.single_blocks.0.forward",
    "a block replaced": "Changing diffusion_model.single_blocks.0",
    "a block of another class": "Changing diffusion_model.single_blocks.0.__class__",
    "a weight edited": "Reading or changing the weights",
    "a weight's data edited": "Reading or changing the weights",
    "a weight replaced": "Changing diffusion_model.img_in.weight",
    "a weight wrapper": "Wrapping weights",
    "a clone for another GPU": "MultiGPU CFG Split",
    "a model of its own": "Replacing the diffusion model",
}
"""Changes inside the diffusion model, which never reach the workers, with a part of the refusal of each."""
