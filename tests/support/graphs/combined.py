"""Graphs with a second prompt, and guiders of several branches."""

from __future__ import annotations

from typing import Any

from tests.support.graphs.flux import Graph, insert_after, node

LONGER = "cond-45.safetensors"


def combined(graph: Graph, kind: str = "ConditioningCombine", first: str = "positive", **inputs: Any) -> Graph:
    """Join a longer prompt, the node "second", to a prompt by a node such as ConditioningCombine."""
    names = {
        "ConditioningCombine": ("conditioning_1", "conditioning_2"),
        "ConditioningSetDefaultCombine": ("cond", "cond_DEFAULT"),
    }
    into, other = names.get(kind, ("conditioning_to", "conditioning_from"))
    graph = insert_after(graph, first, kind, into, **{other: ["second", 0]}, **inputs)
    return graph | {"second": node("LoadConditioning", conditioning=LONGER)}


def ranged(graph: Graph, prompt: str, start: float, end: float) -> Graph:
    return insert_after(graph, prompt, "ConditioningSetTimestepRange", "conditioning", start=start, end=end)


def with_area(graph: Graph) -> Graph:
    """Return the graph, of a picture 128 pixels wide, with a second prompt for the left half only."""
    area = {"width": 64, "height": 64, "x": 0, "y": 0, "strength": 1.0}  # ComfyUI accepts no smaller area
    return insert_after(combined(graph), "second", "ConditioningSetArea", "conditioning", **area)


def with_prompt_mask(graph: Graph) -> Graph:
    """Return the graph with a second prompt under a mask."""
    size = {key: graph["latent"]["inputs"][key] for key in ("width", "height")}
    settings = {"mask": ["mask", 0], "strength": 1.0, "set_cond_area": "default"}
    graph = insert_after(combined(graph), "second", "ConditioningSetMask", "conditioning", **settings)
    return graph | {"mask": node("SolidMask", value=0.5, **size)}


def with_guider(graph: Graph, guider: dict[str, Any], select: dict[str, Any] | None = None) -> Graph:
    """Return the graph with SamplerCustomAdvanced in place of KSampler, with the same noise, sigmas and sampler.

    `select` replaces the sampler.
    """
    given = graph["sampler"]["inputs"]
    links = {name: [name, 0] for name in ("noise", "guider", "sigmas")}
    schedule = {"scheduler": given["scheduler"], "steps": given["steps"], "denoise": 1.0}
    return graph | {
        "noise": node("RandomNoise", noise_seed=given["seed"]),
        "guider": guider,
        "select": select or node("KSamplerSelect", sampler_name=given["sampler_name"]),
        "sigmas": node("BasicScheduler", model=["model", 0], **schedule),
        "sampler": node("SamplerCustomAdvanced", **links, sampler=["select", 0], latent_image=["latent", 0]),
    }


def with_dual_cfg(
    graph: Graph, cfg_conds: float = 2.0, cfg_cond2_negative: float = 1.5, style: str = "regular"
) -> Graph:
    """Return the graph with DualCFGGuider for three prompts, of which "second" is longer than the others."""
    prompts = {"cond1": ["positive", 0], "cond2": ["second", 0], "negative": ["negative", 0]}
    strengths = {"cfg_conds": cfg_conds, "cfg_cond2_negative": cfg_cond2_negative, "style": style}
    graph = with_guider(graph, node("DualCFGGuider", model=["model", 0], **prompts, **strengths))
    return graph | {"second": node("LoadConditioning", conditioning=LONGER)}


def with_perp_neg(graph: Graph, empty: str = "second") -> Graph:
    """Return the graph with PerpNegGuider. Its empty prompt is the node `empty`, of which "second" is longer than the others."""
    prompts = {"positive": ["positive", 0], "negative": ["negative", 0], "empty_conditioning": [empty, 0]}
    graph = with_guider(graph, node("PerpNegGuider", model=["model", 0], **prompts, cfg=2.0, neg_scale=0.5))
    return graph | {"second": node("LoadConditioning", conditioning=LONGER)}
