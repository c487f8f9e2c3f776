"""Splits and batches of models that run whole."""

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
"""Pixels of a picture: 8 x 5 of a latent, which a scale makes 4 x 3."""


def batched(graph: Graph, batch: int, size: Mapping[str, int] = SIZE) -> Graph:
    """The same with so many pictures."""
    return graph | {"latent": node("EmptyLatentImage", **size, batch_size=batch)}
