"""Models whose forward is not spread, through Load Parallel Diffusion Model: the stock loader's result under cfg and data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from scripts.comfyui import ComfyUI
from tests.host.comfy_graphs import TOLERANCE, LatentOf, graph_of, spread
from tests.host.conftest import relative_error
from tests.host.graphs import Graph, node
from tests.host.more_families import save_with_prompts
from tests.selection import product

SPLITS: Mapping[str, dict[str, Any]] = {
    "cfg 2": {"devices": "cpu:2", "cfg": 2},
    "data 2": {"devices": "cpu:2", "data": 2},
    "data 2, cfg 2": {"devices": "cpu:4", "cfg": 2, "data": 2},
    "one worker": {"devices": "cpu:1"},
}


@pytest.fixture(scope="module", autouse=True)
def _files(comfyui: ComfyUI) -> None:
    for name in ("sd15", "sdxl"):
        save_with_prompts(comfyui, name)


def batched(graph: Graph, batch: int) -> Graph:
    """The same with so many pictures of 112 x 72 pixels."""
    return graph | {"latent": node("EmptyLatentImage", width=112, height=72, batch_size=batch)}


@product(name=("sd15", "sdxl"), split=SPLITS)
def test_every_split_gives_the_stock_result(name: str, split: dict[str, Any], latent_of: LatentOf) -> None:
    graph = batched(graph_of(name, steps=2), 3)
    assert relative_error(latent_of(spread(graph, **split)), latent_of(graph)) <= TOLERANCE
