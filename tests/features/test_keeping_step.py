"""Branches and parts of a batch that compute differently: no rank waits for a gather that the others never issue.

Every kind runs under every split with sharded weights, which all ranks gather; the other stores run pairwise.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from safetensors.torch import save_file

from scripts.comfyui import ComfyUI
from tests.support.graphs.comfyui import LatentOf, graph_of, save_families, spread
from tests.support.graphs.flux import Graph, insert_after, insert_after_model, ksampler_graph, node, step_by_step
from tests.support.latents import relative_error
from tests.support.selection import pairwise, thorough
from tests.support.server import NARROW
from tests.support.tiny.models import draw

TOLERANCE = 1e-5
SIZE, STEPS, SEED = 64, 4, 2600
LONG = "cond-45"


def basic(sampler: str = "euler", **settings: Any) -> Graph:
    size = {"width": SIZE, "height": SIZE, "batch": 2}
    return ksampler_graph(NARROW, **size | {"seed": SEED, "steps": STEPS, "cfg": 2.0, "sampler": sampler} | settings)


def with_second(graph: Graph, kind: str = "ConditioningCombine", text: str = LONG) -> Graph:
    """Add a second positive prompt, joined to the first one."""
    into, other = {
        "ConditioningCombine": ("conditioning_1", "conditioning_2"),
        "ConditioningSetDefaultCombine": ("cond", "cond_DEFAULT"),
    }[kind]
    graph = insert_after(graph, "positive", kind, into, **{other: ["second", 0]})
    return graph | {"second": node("LoadConditioning", conditioning=f"{text}.safetensors")}


def ranged(graph: Graph, prompt: str, start: float, end: float) -> Graph:
    return insert_after(graph, prompt, "ConditioningSetTimestepRange", "conditioning", start=start, end=end)


def three_ranges(sampler: str) -> Graph:
    """Return a graph with a prompt of another length only in the middle of the run."""
    return ranged(with_second(basic(sampler)), "second", 0.25, 0.75)


def area(sampler: str) -> Graph:
    left = {"width": 64, "height": 64, "x": 0, "y": 0, "strength": 1.0}  # ComfyUI accepts no smaller area
    return insert_after(with_second(basic(sampler, width=128)), "second", "ConditioningSetArea", "conditioning", **left)


def mask(sampler: str) -> Graph:
    graph = with_second(basic(sampler)) | {"mask": node("SolidMask", value=0.5, width=SIZE, height=SIZE)}
    settings = {"mask": ["mask", 0], "strength": 1.0, "set_cond_area": "default"}
    return insert_after(graph, "second", "ConditioningSetMask", "conditioning", **settings)


def guided(sampler: str, kind: str, **inputs: Any) -> Graph:
    """Return a graph of SamplerCustomAdvanced with a guider of several branches."""
    graph = basic(sampler)
    return graph | {
        "third": node("LoadConditioning", conditioning=f"{LONG}.safetensors"),
        "noise": node("RandomNoise", noise_seed=SEED),
        "guider": node(kind, model=["model", 0], **inputs),
        "select": node("KSamplerSelect", sampler_name=sampler),
        "sigmas": node("BasicScheduler", model=["model", 0], scheduler="simple", steps=STEPS, denoise=1.0),
        "sampler": node(
            "SamplerCustomAdvanced",
            noise=["noise", 0],
            guider=["guider", 0],
            sampler=["select", 0],
            sigmas=["sigmas", 0],
            latent_image=["latent", 0],
        ),
    }


def perp_neg(sampler: str) -> Graph:
    prompts = {"positive": ["positive", 0], "negative": ["negative", 0], "empty_conditioning": ["third", 0]}
    return guided(sampler, "PerpNegGuider", **prompts, cfg=2.0, neg_scale=0.5)


def dual_cfg(sampler: str) -> Graph:
    prompts = {"cond1": ["positive", 0], "cond2": ["third", 0], "negative": ["negative", 0]}
    return guided(sampler, "DualCFGGuider", **prompts, cfg_conds=2.0, cfg_cond2_negative=1.5, style="regular")


def easy_cache(sampler: str) -> Graph:
    """Return a graph with EasyCache, which skips calls, and a range that makes the branches differ in some of the other calls."""
    graph = ranged(with_second(basic(sampler, steps=8)), "second", 0.0, 0.5)
    settings = {"reuse_threshold": 0.3, "start_percent": 0.1, "end_percent": 0.9, "verbose": False}
    return insert_after_model(graph, "EasyCache", **settings)


def rescaled(sampler: str) -> Graph:
    return insert_after_model(with_second(basic(sampler)), "RescaleCFG", multiplier=0.7)


def wan(sampler: str) -> Graph:
    """Return a graph of a video with two texts of different length."""
    graph = graph_of("wan", sampler_name=sampler, seed=SEED, steps=3)
    graph["latent"]["inputs"]["batch_size"] = 2
    other = node("LoadConditioning", conditioning="wan-negative.safetensors")
    return insert_after(graph, "positive", "ConditioningCombine", "conditioning_1", conditioning_2=["other", 0]) | {
        "other": other
    }


def vace(sampler: str) -> Graph:
    """Return a graph with two control videos for the positive prompt and none for the negative."""
    graph = graph_of("vace", sampler_name=sampler, seed=SEED, steps=3)
    graph = insert_after(graph, "positive", "PackPrompt", "conditioning", file="two-videos.safetensors")
    graph["latent"]["inputs"]["batch_size"] = 2
    return graph


KINDS: Mapping[str, Callable[[str], Graph]] = {
    "combine of two lengths": lambda sampler: with_second(basic(sampler)),
    "combine of two lengths, Wan": wan,
    "combine under RescaleCFG": rescaled,
    "nothing combined, texts of two lengths": lambda sampler: basic(sampler, negative=LONG),
    "a range": three_ranges,
    "an area": area,
    "PerpNeg": perp_neg,
    "DualCFG": dual_cfg,
    "a mask": mask,
    "default combine": lambda sampler: with_second(basic(sampler), "ConditioningSetDefaultCombine"),
    "one side only": lambda sampler: ranged(basic(sampler), "positive", 0.0, 0.5),
    "two control videos against none": vace,
    "EasyCache with a range": easy_cache,
    "a batch that does not divide": lambda sampler: with_second(basic(sampler, batch=3)),
}

SPLITS: Mapping[str, dict[str, int]] = {
    "cfg 2": {"cfg": 2},
    "data 2": {"data": 2},
    "cfg 2, data 2": {"cfg": 2, "data": 2},
    "cfg 2, ulysses 2": {"cfg": 2, "ulysses": 2},
    "data 2, ulysses 2": {"data": 2, "ulysses": 2},
    "cfg 2, data 2, ulysses 2": {"cfg": 2, "data": 2, "ulysses": 2},
}

WAYS: Mapping[str, tuple[str, bool]] = {
    "loop": ("euler", False),
    "uni_pc": ("uni_pc", False),
    "one call at a time": ("euler", True),
}
"""The sampler of each way, and true if the graph gets a node that the workers' loop does not support."""

LOOPS = [*WAYS]

QUICK_SPLITS = 5
"""Number of splits through which the quick run cycles: eight workers take long."""


@pytest.fixture(scope="module", autouse=True)
def _files(comfyui: ComfyUI) -> None:
    save_families(comfyui, "vace", "wan")
    frames, masks = draw(2, 1, 32, 3, 8, 10, seed=31), (draw(2, 1, 64, 3, 8, 10, seed=32) > 0).float()
    given = {"vace_frames": frames, "vace_mask": masks}
    save_file(given, comfyui.input_dir / "two-videos.safetensors")


def check(latent_of: LatentOf, kind: str, split: str, way: str, weights: str) -> None:
    """Check that the latent equals the stock loader's."""
    sampler, one_at_a_time = WAYS[way]
    graph = KINDS[kind](sampler)
    stock = latent_of(graph)
    ours = copy.deepcopy(graph)
    if one_at_a_time and ours["sampler"]["class_type"] == "KSampler":
        ours = step_by_step(ours)
    workers = math.prod(SPLITS[split].values())
    plan: dict[str, Any] = {"cfg": 1, "ulysses": 1, "ring": 1, "weights": weights} | SPLITS[split]
    error = relative_error(latent_of(spread(ours, f"cpu:{workers}", strict=False, **plan)), stock)
    print(f"off by {error:.1e}")
    assert error <= TOLERANCE


CASES = [
    pytest.param(
        kind,
        split,
        LOOPS[(row + column) % len(LOOPS)],
        id=f"{kind}-{split}",
        marks=[] if column == row % QUICK_SPLITS else [thorough],
    )
    for row, kind in enumerate(KINDS)
    for column, split in enumerate(SPLITS)
]


@pytest.mark.parametrize(("kind", "split", "way"), CASES)
def test_ranks_with_different_work_give_the_stock_latent_with_sharded_weights(
    latent_of: LatentOf, kind: str, split: str, way: str
) -> None:
    check(latent_of, kind, split, way, "sharded")


@thorough
@pairwise(kind=[*KINDS], split=[*SPLITS], weights=["streamed", "replicated"], way=LOOPS)
def test_ranks_with_different_work_give_the_stock_latent_with_other_stores(
    latent_of: LatentOf, kind: str, split: str, weights: str, way: str
) -> None:
    check(latent_of, kind, split, way, weights)
