"""Branches and parts of a batch that compute differently: no rank waits for a gather that the others never issue.

Every kind runs under every split with sharded weights, which all ranks gather; the other stores run pairwise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from safetensors.torch import save_file

from scripts.comfyui import ComfyUI
from tests.features.conftest import EqualLatents
from tests.support.graphs.combined import combined, ranged, with_area, with_dual_cfg, with_prompt_mask
from tests.support.graphs.comfyui import graph_of, save_families, spread
from tests.support.graphs.flux import Graph, insert_after, insert_after_model, ksampler_graph, node, step_by_step
from tests.support.selection import pairwise, thorough
from tests.support.server import NARROW
from tests.support.tiny.models import draw

SIZE, STEPS, SEED = 64, 3, 2600


def basic(sampler: str = "euler", **settings: Any) -> Graph:
    """Return a graph of two pictures.

    On a CPU uni_pc writes into the sigmas that ComfyUI keeps of a scheduler node. With a number of steps of its own, no other
    sampler gets them.
    """
    size = {"width": SIZE, "height": SIZE, "batch": 2, "steps": STEPS + (sampler == "uni_pc")}
    return ksampler_graph(NARROW, **size | {"seed": SEED, "cfg": 2.0, "sampler": sampler} | settings)


def easy_cache(sampler: str) -> Graph:
    """Return a graph with EasyCache, which skips calls, and a range that makes the branches differ in some of the other calls."""
    graph = ranged(combined(basic(sampler, steps=8)), "second", 0.0, 0.5)
    settings = {"reuse_threshold": 0.3, "start_percent": 0.1, "end_percent": 0.9, "verbose": False}
    return insert_after_model(graph, "EasyCache", **settings)


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
    "combine of two lengths": lambda sampler: combined(basic(sampler)),
    "combine of two lengths, Wan": wan,
    "combine under RescaleCFG": lambda sampler: insert_after_model(
        combined(basic(sampler)), "RescaleCFG", multiplier=0.7
    ),
    "an area": lambda sampler: with_area(basic(sampler, width=128)),
    "DualCFG": lambda sampler: with_dual_cfg(basic(sampler)),
    "a mask": lambda sampler: with_prompt_mask(basic(sampler)),
    "default combine": lambda sampler: combined(basic(sampler), "ConditioningSetDefaultCombine"),
    "one side only": lambda sampler: ranged(basic(sampler), "positive", 0.0, 0.5),
    "two control videos against none": vace,
    "EasyCache with a range": easy_cache,
    "a batch that does not divide": lambda sampler: combined(basic(sampler, batch=3)),
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

QUICK_SPLITS = 5
"""Number of splits through which the quick run cycles: eight workers take long."""

THOROUGH = {
    "combine of two lengths, Wan": "combine of two lengths",
    "DualCFG": "test_guiders has three branches, and combine under RescaleCFG two calls at a time",
    "two control videos against none": "one side only",
    "a batch that does not divide": "combine of two lengths; test_flux_parity has batches of three",
    "EasyCache with a range": "test_step_caches has texts of two lengths",
}
"""The kinds left to `--all`, each with its cover in the quick run."""

FAMILIES = {"combine of two lengths, Wan": "wan", "two control videos against none": "vace"}
"""Kinds on other models than FLUX.1, and these models."""


@pytest.fixture(scope="module")
def families(comfyui: ComfyUI) -> None:
    """Save the models of FAMILIES."""
    save_families(comfyui, *FAMILIES.values())
    frames, masks = draw(2, 1, 32, 3, 8, 10, seed=31), (draw(2, 1, 64, 3, 8, 10, seed=32) > 0).float()
    given = {"vace_frames": frames, "vace_mask": masks}
    save_file(given, comfyui.input_dir / "two-videos.safetensors")


Check = Callable[[str, str, str, str], None]


@pytest.fixture
def check(request: pytest.FixtureRequest, assert_equal_latents: EqualLatents) -> Check:
    """Provide a function that checks that the latent of a kind, split, way and store equals the stock loader's."""

    def run(kind: str, split: str, way: str, weights: str) -> None:
        if kind in FAMILIES:
            request.getfixturevalue("families")
        sampler, one_at_a_time = WAYS[way]
        ours = graph = KINDS[kind](sampler)
        if one_at_a_time and graph["sampler"]["class_type"] == "KSampler":
            ours = step_by_step(graph)
        plan: dict[str, Any] = {"cfg": 1, "ulysses": 1, "ring": 1, "weights": weights} | SPLITS[split]
        workers = math.prod(SPLITS[split].values())
        assert_equal_latents(spread(ours, f"cpu:{workers}", strict=False, **plan), graph)

    return run


@pytest.mark.parametrize(
    ("kind", "split", "way"),
    [
        pytest.param(
            kind,
            split,
            [*WAYS][(row + column) % len(WAYS)],
            id=f"{kind}-{split}",
            marks=[thorough] * (column != row % QUICK_SPLITS or kind in THOROUGH),
        )
        for column, split in enumerate(SPLITS)  # outermost, because each change of devices starts new workers
        for row, kind in enumerate(KINDS)
    ],
)
def test_ranks_with_different_work_give_the_stock_latent_with_sharded_weights(
    check: Check, kind: str, split: str, way: str
) -> None:
    check(kind, split, way, "sharded")


@thorough
@pairwise(kind=[*KINDS], split=[*SPLITS], weights=["streamed", "replicated"], way=[*WAYS])
def test_ranks_with_different_work_give_the_stock_latent_with_other_stores(
    check: Check, kind: str, split: str, weights: str, way: str
) -> None:
    check(kind, split, way, weights)
