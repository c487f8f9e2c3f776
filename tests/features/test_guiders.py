"""Guiders that store their guidance elsewhere than CFGGuider: their branches for a plan's cfg 2, and the stock latent."""

from __future__ import annotations

from typing import Any

import pytest

from scripts.comfyui import ComfyUI
from tests.support.graphs.comfyui import LatentOf
from tests.support.graphs.flux import Graph, insert_after_model, node, parallel, queue_logged, ways
from tests.support.graphs.other_packs import basic, custom, guided
from tests.support.latents import relative_error, saved_latent
from tests.support.selection import product

ONE_SIDE = "cfg 2 needs a negative prompt, and this sampling has none for this model (at cfg 1, or with BasicGuider"
NEGATIVE = {"negative": ["negative", 0]}


def dual(cfg_conds: float, cfg_cond2_negative: float, style: str = "regular") -> Graph:
    """Return a graph with three prompts, two of them guided by cfgs of their own; one prompt is longer than the others."""
    prompts = {"cond1": ["positive", 0], "cond2": ["second", 0]}
    strengths = {"cfg_conds": cfg_conds, "cfg_cond2_negative": cfg_cond2_negative, "style": style}
    graph = custom(guider=node("DualCFGGuider", model=["model", 0], **prompts, **NEGATIVE, **strengths))
    return graph | {"second": node("LoadConditioning", conditioning="cond-45.safetensors")}


def perp_neg() -> Graph:
    others = {"empty_conditioning": ["negative", 0], "cfg": 2.0, "neg_scale": 0.5}
    return custom(guider=node("PerpNegGuider", model=["model", 0], positive=["positive", 0], **NEGATIVE, **others))


def overridden(cfg: float, by: float) -> Graph:
    """Return a graph of KSampler at a cfg that CFGOverride replaces in the second of two steps."""
    graph = basic()
    graph["sampler"]["inputs"]["cfg"] = cfg
    return insert_after_model(graph, "CFGOverride", cfg=by, start_percent=0.3, end_percent=1.0)


def two_models() -> Graph:
    """Return a graph whose negative branch runs on a second model."""
    prompts = {"positive": ["positive", 0], "negative": ["negative", 0], "model_negative": ["model", 0]}
    return custom(guider=node("DualModelGuider", model=["model", 0], **prompts, cfg=2.0))


TWO_SIDED: dict[str, Graph] = {
    "DualCFGGuider": dual(2.0, 1.5),
    "DualCFGGuider, nested": dual(2.0, 1.0, "nested"),
    "DualCFGGuider, the second at 1": dual(2.0, 1.0),
    "PerpNegGuider": perp_neg(),
    "CFGOverride above 1": overridden(1.0, by=2.0),
    "another pack's": guided("a strength of its own"),
}
ONE_SIDED: dict[str, Graph] = {
    "DualCFGGuider, both at 1": dual(1.0, 1.0),
    "DualModelGuider": two_models(),
}


WISHES = {"cfg 2": {"cfg": 2}, "automatic": {"cfg": 0, "ulysses": 1, "ring": 1}}
"""Requested plans. The automatic plan may choose only cfg, because the choice of other degrees depends on measurements."""


@product(graph=TWO_SIDED, requested_plan=WISHES)
def test_the_branches_that_a_guider_needs_run_on_two_workers(
    comfyui: ComfyUI, latent_of: LatentOf, graph: Graph, requested_plan: dict[str, int]
) -> None:
    run, log = queue_logged(comfyui, parallel(graph, "cpu:2", **requested_plan))
    assert relative_error(saved_latent(comfyui, run.check()), latent_of(graph)) <= 1e-5
    assert ways(log) != ["loop"]
    assert "one forward per model call on 2 workers (cpu): cfg 2, " in log


@pytest.mark.parametrize("graph", [pytest.param(graph, id=name) for name, graph in ONE_SIDED.items()])
def test_a_guider_with_one_branch_at_a_time_gets_no_worker_for_a_second_branch(
    comfyui: ComfyUI, latent_of: LatentOf, graph: Graph
) -> None:
    refused = comfyui.queue(parallel(graph, "cpu:2", cfg=2))
    assert refused.error is not None
    assert refused.error.exception_message.startswith(ONE_SIDE)
    run, log = queue_logged(comfyui, parallel(graph, "cpu:2", cfg=0))
    assert relative_error(saved_latent(comfyui, run.check()), latent_of(graph)) <= 1e-5
    assert "): cfg 2" not in log


def test_a_guider_of_three_branches_under_cfg_2_and_ulysses_2_gives_the_stock_latent(
    comfyui: ComfyUI, latent_of: LatentOf
) -> None:
    plan: dict[str, Any] = {"cfg": 2, "ulysses": 2}
    graph = TWO_SIDED["DualCFGGuider"]
    run = comfyui.queue(parallel(graph, "cpu:4", **plan), timeout=300).check()
    assert relative_error(saved_latent(comfyui, run), latent_of(graph)) <= 1e-5
