"""Stock nodes change a video on workers as with the stock loader: moved positions, skipped and compiled blocks."""

from __future__ import annotations

from typing import Any

import pytest

from scripts.comfyui import ComfyUI
from tests.features.conftest import EqualLatents
from tests.support.graphs.comfyui import PLANS, LatentOf, graph_of, save_families, spread
from tests.support.graphs.diffusers import refused
from tests.support.graphs.family_checks import assert_matters_and_stock
from tests.support.graphs.flux import insert_after_model, ways
from tests.support.graphs.guidance import SKIPPING

NODES: dict[str, tuple[bool, dict[str, Any]]] = {
    "ScaleROPE": (True, {f"{what}_{axis}": 1.5 for what in ("scale", "shift") for axis in "xyt"}),
    "SkipLayerGuidanceDiT": (False, SKIPPING),
}
"""Nodes that change the model: true if the node runs in the workers' loop, and the node's inputs.

test_every_node and test_stock_nodes_on_flux have the nodes that change the guidance.
"""


@pytest.fixture(scope="module", autouse=True)
def _files(comfyui: ComfyUI) -> None:
    save_families(comfyui, "wan")


@pytest.mark.parametrize("kind", NODES)
def test_a_node_changes_the_video_as_it_does_with_the_stock_loader(kind: str, latent_of: LatentOf) -> None:
    in_the_loop, inputs = NODES[kind]
    plain = graph_of("wan", steps=2)
    graph = insert_after_model(plain, kind, **inputs)
    assert_matters_and_stock(latent_of, plain, graph, strict=in_the_loop)


def test_torch_compile_compiles_the_workers_blocks(assert_equal_latents: EqualLatents) -> None:
    """The backend cudagraphs runs the same graphs uncompiled on CPUs, which have no recorder. Inductor takes minutes.

    One worker is enough, since all workers compile the same blocks; tests/models (`test_compiled`) tests divided blocks.
    """
    graph = graph_of("wan", steps=2)
    ours = insert_after_model(spread(graph, "cpu:1"), "TorchCompileModel", backend="cudagraphs")
    log = assert_equal_latents(ours, graph)
    assert ways(log) == ["loop"]
    assert "blocks compiled by cudagraphs" in log
    assert "is not compiled" not in log


def test_skipping_as_many_blocks_as_a_stage_has_is_refused(comfyui: ComfyUI) -> None:
    graph = insert_after_model(graph_of("wan"), "SkipLayerGuidanceDiT", **SKIPPING)
    assert refused(comfyui, spread(graph, strict=False, **PLANS[1])) == (
        "the guidance skips 1 of the model's blocks and a PipeFusion stage of the plan has only 1: choose pipefusion 1 in "
        "Parallel Plan, or skip fewer blocks."
    )
