"""Splits and batches of models that run unsharded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.support.graphs.flux import Graph, node

SPLITS: Mapping[str, dict[str, Any]] = {
    "cfg 2": {"devices": "cpu:2", "cfg": 2},
    "data 2": {"devices": "cpu:2", "data": 2},
    "data 2, cfg 2": {"devices": "cpu:4", "cfg": 2, "data": 2},
    "one worker": {"devices": "cpu:1"},
}
SIZE = {"width": 64, "height": 40}
"""Pixels of a picture: 8 x 5 in the latent, and 4 x 3 at the next scale."""


def batched(graph: Graph, batch: int, size: Mapping[str, int] = SIZE) -> Graph:
    """Return the graph with a batch of this size."""
    return graph | {"latent": node("EmptyLatentImage", **size, batch_size=batch)}
