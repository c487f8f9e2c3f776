"""Stock nodes change a video on workers as with the stock loader: moved positions, skipped blocks, guidance."""

from __future__ import annotations

from typing import Any

import pytest

from scripts.comfyui import ComfyUI
from tests.support.graphs.comfyui import PLANS, LatentOf, graph_of, masked, save_families, spread
from tests.support.graphs.diffusers import refused
from tests.support.graphs.family_checks import assert_matters_and_stock
from tests.support.graphs.flux import Graph, insert_after_model
from tests.support.graphs.guidance import SKIPPING
from tests.support.selection import thorough

NODES: dict[str, tuple[bool, dict[str, Any]]] = {
    "ScaleROPE": (True, {f"{what}_{axis}": 1.5 for what in ("scale", "shift") for axis in "xyt"}),
    "SkipLayerGuidanceDiT": (False, SKIPPING),
    "CFGNorm": (True, {"strength": 0.9}),
    "CFGZeroStar": (True, {}),
    "Epsilon Scaling": (True, {"scaling_factor": 1.02}),
    "RescaleCFG": (False, {"multiplier": 0.7}),
    "APG": (False, {"eta": 0.5, "norm_threshold": 2.0, "momentum": 0.3}),
    "TCFG": (False, {}),
    "CFGOverride": (False, {"cfg": 1.0, "start_percent": 0.4, "end_percent": 1.0}),
    "DifferentialDiffusion": (False, {"strength": 1.0}),
}
"""The nodes under test by class: True if the node runs in the workers' loop, and the node's inputs."""


@pytest.fixture(scope="module", autouse=True)
def _files(comfyui: ComfyUI) -> None:
    save_families(comfyui, "wan")


QUICK = ("ScaleROPE", "SkipLayerGuidanceDiT")
"""The nodes that change the model; test_stock_nodes_on_flux tests the others on FLUX.1."""


def job(kind: str) -> Graph:
    """Return the graph without the node. Differential Diffusion gets a mask of 0.5, which it reads as the time to begin."""
    graph = graph_of("wan")
    if kind == "DifferentialDiffusion":
        graph = masked(graph, 10, 9, 3)
        graph["others"]["inputs"]["color"] = 0x808080
    return graph


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=[thorough] * (kind not in QUICK)) for kind in NODES])
def test_a_node_changes_the_video_as_it_does_with_the_stock_loader(kind: str, latent_of: LatentOf) -> None:
    in_the_loop, inputs = NODES[kind]
    plain = job(kind)
    graph = insert_after_model(plain, kind, **inputs)
    assert_matters_and_stock(latent_of, plain, graph, strict=in_the_loop)


def test_skipping_as_many_blocks_as_a_stage_has_is_refused(comfyui: ComfyUI) -> None:
    graph = insert_after_model(graph_of("wan"), "SkipLayerGuidanceDiT", **SKIPPING)
    assert refused(comfyui, spread(graph, strict=False, **PLANS[1])) == (
        "the guidance skips 1 of the model's blocks and a PipeFusion stage of the plan has only 1: choose pipefusion 1 in "
        "Parallel Plan, or skip fewer blocks."
    )
