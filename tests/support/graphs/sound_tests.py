"""Plans and stock results that the tests of videos with sound share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from scripts.comfyui import ComfyUI
from tests.support.graphs.comfyui import PLANS
from tests.support.graphs.flux import Graph
from tests.support.graphs.sound import both
from tests.support.latents import cached_by_graph

SOUND_PLANS: list[dict[str, Any]] = [
    PLANS[0],
    {"devices": "cpu:3", "ring": 3},
    {"devices": "cpu:2", "cfg": 2, "weights": "sharded"},
    {"devices": "cpu:2", "pipefusion": 2},
    {"devices": "cpu:4", "ulysses": 2, "ring": 2},
]

Stock = Callable[[Graph], tuple[Tensor, Tensor]]


def stock_of(server: ComfyUI) -> Stock:
    """Return a function that gives the stock loader's two latents of a graph, cached by graph."""
    return cached_by_graph(lambda graph: both(server, graph)[:2])
