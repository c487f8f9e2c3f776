"""Guiders that store their guidance elsewhere than CFGGuider: their branches for a plan's cfg 2, and the stock latent."""

from __future__ import annotations

import pytest

from scripts.comfyui import ComfyUI
from tests.features.conftest import EqualLatents
from tests.support.graphs.combined import with_dual_cfg, with_guider, with_perp_neg
from tests.support.graphs.flux import Graph, insert_after_model, node, parallel, ways
from tests.support.graphs.other_packs import basic, guided
from tests.support.selection import crossed

ONE_SIDE = "cfg 2 needs a negative prompt, and this sampling has none for this model (at cfg 1, or with BasicGuider"


def overridden(cfg: float, by: float) -> Graph:
    """Return a graph of KSampler at a cfg that CFGOverride replaces in the second of two steps."""
    graph = basic()
    graph["sampler"]["inputs"]["cfg"] = cfg
    return insert_after_model(graph, "CFGOverride", cfg=by, start_percent=0.3, end_percent=1.0)


def two_models() -> Graph:
    """Return a graph whose negative branch runs on a second model."""
    prompts = {"positive": ["positive", 0], "negative": ["negative", 0], "model_negative": ["model", 0]}
    return with_guider(basic(), node("DualModelGuider", model=["model", 0], **prompts, cfg=2.0))


TWO_SIDED: dict[str, Graph] = {
    "DualCFGGuider": with_dual_cfg(basic(), 2.0, 1.5),
    "DualCFGGuider, nested": with_dual_cfg(basic(), 2.0, 1.0, "nested"),
    "DualCFGGuider, the second at 1": with_dual_cfg(basic(), 2.0, 1.0),
    "PerpNegGuider": with_perp_neg(basic(), empty="negative"),
    "CFGOverride above 1": overridden(1.0, by=2.0),
    "another pack's": guided("a strength of its own"),
}
ONE_SIDED: dict[str, Graph] = {
    "DualCFGGuider, both at 1": with_dual_cfg(basic(), 1.0, 1.0),
    "DualModelGuider": two_models(),
}


WISHES = {"cfg 2": {"cfg": 2}, "automatic": {"cfg": 0, "ulysses": 1, "ring": 1}}
"""Requested plans. The automatic plan may choose only cfg, because the choice of other degrees depends on measurements."""

QUICK = {
    "DualCFGGuider, nested": "automatic",
    "PerpNegGuider": "automatic",
    "CFGOverride above 1": "cfg 2",
    "another pack's": "automatic",
}
"""The cases of the quick run. The last test has DualCFGGuider under cfg 2."""


@pytest.mark.parametrize(("graph", "requested_plan"), crossed(TWO_SIDED, WISHES, QUICK))
def test_the_branches_that_a_guider_needs_run_on_two_workers(
    assert_equal_latents: EqualLatents, graph: Graph, requested_plan: dict[str, int]
) -> None:
    log = assert_equal_latents(parallel(graph, "cpu:2", **requested_plan), graph)
    assert ways(log) != ["loop"]
    assert "one forward per model call on 2 workers (cpu): cfg 2, " in log


@pytest.mark.parametrize("graph", ONE_SIDED.values(), ids=ONE_SIDED)
def test_a_guider_with_one_branch_at_a_time_gets_no_worker_for_a_second_branch(
    comfyui: ComfyUI, assert_equal_latents: EqualLatents, graph: Graph
) -> None:
    refused = comfyui.queue(parallel(graph, "cpu:2", cfg=2))
    assert refused.error is not None
    assert refused.error.exception_message.startswith(ONE_SIDE)
    assert "): cfg 2" not in assert_equal_latents(parallel(graph, "cpu:2", cfg=0), graph)


def test_a_guider_of_three_branches_under_cfg_2_and_ulysses_2_gives_the_stock_latent(
    assert_equal_latents: EqualLatents,
) -> None:
    graph = TWO_SIDED["DualCFGGuider"]
    assert_equal_latents(parallel(graph, "cpu:4", cfg=2, ulysses=2), graph)
