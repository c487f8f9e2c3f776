"""Graphs that save a prompt and load it."""

from __future__ import annotations

from typing import Any

import torch

from tests.support.graphs.flux import Graph, node

WHOLE = {
    "cond": torch.randn(2, 7, 64, generator=torch.Generator().manual_seed(0)),
    "pooled_output": torch.randn(2, 32, generator=torch.Generator().manual_seed(1)),
    "attention_mask": torch.tensor([[1, 1, 1, 0, 1, 1, 0], [1, 0, 1, 1, 1, 1, 1]]),
}


def round_trip(prefix: str, between: dict[str, Any] | None = None) -> Graph:
    """Return a graph that loads "whole", lets a node change it, and saves it. The ids are load, between and save."""
    graph = {
        "load": node("LoadConditioning", conditioning="whole.safetensors"),
        "save": node("SaveConditioning", conditioning=["load", 0], filename_prefix=prefix),
    }
    if between:
        graph |= {"between": between}
        graph["save"]["inputs"]["conditioning"] = ["between", 0]
    return graph
