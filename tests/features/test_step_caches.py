"""EasyCache and LazyCache in the workers' loop skip the same model calls as in ComfyUI, and give the same picture."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor

from scripts.comfyui import ComfyUI
from tests.support.graphs.flux import Graph, insert_after_model, ksampler_graph, parallel, queue_logged, ways
from tests.support.latents import cached_by_graph, relative_error, saved_latent
from tests.support.server import NARROW

STEPS = 10
SKIPPED = re.compile(rf"(EasyCache|LazyCache) - skipped (\d+)/{STEPS} steps")

ALL = {"verbose": False, "start_percent": 0.0, "end_percent": 1.0}
PART = ALL | {"start_percent": 0.15, "end_percent": 0.6}


def cached(name: str, threshold: float, settings: dict[str, Any] = ALL, **graph: Any) -> Graph:
    """Return a graph of many small steps with a cache node."""
    whole = ksampler_graph(NARROW, width=64, height=64, **{"steps": STEPS, "cfg": 2.0} | graph)
    return insert_after_model(whole, name, reuse_threshold=threshold, **settings)


@pytest.fixture(scope="module")
def stock(comfyui: ComfyUI) -> Callable[[Graph], tuple[Tensor, list[tuple[str, str]]]]:
    """Provide a function that returns a graph's latent with ComfyUI's own loader and the number of skipped steps in its log."""

    def run(graph: Graph) -> tuple[Tensor, list[tuple[str, str]]]:
        ran, log = queue_logged(comfyui, graph)
        return saved_latent(comfyui, ran.check()), SKIPPED.findall(log)

    return cached_by_graph(run)


CFG, ULYSSES = {"cfg": 2}, {"cfg": 1, "ulysses": 2}
CASES: dict[str, tuple[Graph, dict[str, int]]] = {
    "EasyCache, texts of two lengths": (cached("EasyCache", 0.2, negative="cond-45"), CFG),
    "EasyCache, two calls a step, in a part of the run": (cached("EasyCache", 0.3, PART, sampler="heun"), ULYSSES),
    "LazyCache in a part of the run": (cached("LazyCache", 0.3, PART), CFG),
    "EasyCache judges a divided batch as a whole": (cached("EasyCache", 0.3, batch=3, seed=11), {"data": 2, "cfg": 1}),
}


@pytest.mark.parametrize(("graph", "plan"), CASES.values(), ids=CASES)
def test_a_step_cache_skips_the_same_steps_as_in_comfyui(comfyui, stock, graph, plan):
    latent, expected = stock(graph)
    run, log = queue_logged(comfyui, parallel(graph, **plan))
    error = relative_error(saved_latent(comfyui, run.check()), latent)
    print(f"skipped {SKIPPED.findall(log)}, off by {error:.1e}")
    assert ways(log) == ["loop"]
    assert "Cache (approximate)" in log
    assert SKIPPED.findall(log) == expected
    assert 0 < int(expected[0][1]) < STEPS, "nothing would be shown"
    assert error <= 1e-5


@pytest.mark.parametrize(
    ("plan", "settings", "reason"),
    [
        ({"pipefusion": 2}, ALL, "EasyCache with PipeFusion"),
        ({"cfg": 2}, ALL | {"verbose": True}, "EasyCache with verbose, which logs every call"),
    ],
    ids=["PipeFusion", "verbose"],
)
def test_step_caches_that_the_loop_does_not_support_run_in_comfyui(comfyui, stock, plan, settings, reason):
    latent, expected = stock(cached("EasyCache", 0.2))
    run, log = queue_logged(comfyui, parallel(cached("EasyCache", 0.2, settings), **plan))
    assert ways(log) == [reason]
    assert SKIPPED.findall(log) == expected
    assert relative_error(saved_latent(comfyui, run.check()), latent) <= 1e-5
