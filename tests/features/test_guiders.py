"""Guiders that store their guidance elsewhere than CFGGuider: their branches for a plan's cfg 2, and the stock latent."""

from __future__ import annotations

import pytest

from scripts.comfyui import ComfyUI
from tests.features.conftest import EqualLatents
from tests.support.graphs.combined import with_dual_cfg, with_guider, with_perp_neg
from tests.support.graphs.flux import UNKNOWN_WRAPPER, Graph, insert_after_model, node, parallel, ways
from tests.support.graphs.other_packs import basic, guided

ONE_SIDE = "cfg 2 needs a negative prompt, and this sampling has none for this model (at cfg 1, or with BasicGuider"


AUTOMATIC = {"cfg": 0, "ulysses": 1, "ring": 1}
"""A requested plan that may choose only cfg, because the choice of other degrees depends on measurements."""

SIDES = ("positive", "negative")


def overridden(cfg: float, by: float) -> Graph:
    """Return a graph of KSampler at a cfg that CFGOverride replaces in the second of two steps."""
    graph = basic()
    graph["sampler"]["inputs"]["cfg"] = cfg
    return insert_after_model(graph, "CFGOverride", cfg=by, start_percent=0.3, end_percent=1.0)


CASES: dict[str, tuple[Graph, dict[str, int], str]] = {
    "DualCFGGuider": (with_dual_cfg(basic()), {"cfg": 2}, "the guider Guider_DualCFG"),
    "DualCFGGuider, nested": (with_dual_cfg(basic(), 2.0, 1.0, "nested"), AUTOMATIC, "the guider Guider_DualCFG"),
    "PerpNegGuider": (with_perp_neg(basic(), empty="negative"), AUTOMATIC, "the guider Guider_PerpNeg"),
    "CFGOverride above 1": (overridden(1.0, by=2.0), {"cfg": 2}, UNKNOWN_WRAPPER),
    "another pack's": (guided("a strength of its own"), AUTOMATIC, "the guider TwoStrengths"),
}
"""Graphs of guiders that need two branches, each with a requested plan and the way in which the graph runs.

test_keeping_step has DualCFGGuider under every split.
"""
ONE_SIDED: dict[str, Graph] = {
    "DualCFGGuider, both at 1": with_dual_cfg(basic(), 1.0, 1.0),
    "DualModelGuider": with_guider(
        basic(),
        node(
            "DualModelGuider", **{name: [name, 0] for name in ("model", *SIDES)}, model_negative=["model", 0], cfg=2.0
        ),
    ),
}


@pytest.mark.parametrize(("graph", "requested_plan", "way"), CASES.values(), ids=CASES)
def test_the_branches_that_a_guider_needs_run_on_two_workers(
    assert_equal_latents: EqualLatents, graph: Graph, requested_plan: dict[str, int], way: str
) -> None:
    log = assert_equal_latents(parallel(graph, "cpu:2", **requested_plan), graph)
    assert ways(log) == [way]
    assert "one forward per model call on 2 workers (cpu): cfg 2, " in log


@pytest.mark.parametrize("graph", ONE_SIDED.values(), ids=ONE_SIDED)
def test_a_guider_with_one_branch_at_a_time_gets_no_worker_for_a_second_branch(
    comfyui: ComfyUI, assert_equal_latents: EqualLatents, graph: Graph
) -> None:
    refused = comfyui.queue(parallel(graph, "cpu:2", cfg=2))
    assert refused.error is not None
    assert refused.error.exception_message.startswith(ONE_SIDE)
    assert "): cfg 2" not in assert_equal_latents(parallel(graph, "cpu:2", cfg=0), graph)
