"""Runs functions on real ranks in tests, forked as the pack does to prove a model, with results of any kind."""

from __future__ import annotations

import functools
import io
from collections.abc import Callable, Sequence
from typing import Any

import torch

from parallel_backend.models.comfyui.proof import ranks
from parallel_backend.models.comfyui.proof.ranks import TIMEOUT

OnRank = Callable[[int], Any]


def run_ranks(world_size: int, function: OnRank, timeout: float = TIMEOUT, *, joined: bool = True) -> list[Any]:
    """Run `function(rank)` on every rank of a gloo group and return the results in rank order.

    Forking needs no import, so eight ranks are up in well under a second.

    Args:
        joined: True if the ranks form a new group before the function is called, false if the function makes the group.
    """
    (results,) = run_in_turn([(world_size, function)], timeout, joined=joined)
    return results


def run_in_turn(
    runs: Sequence[tuple[int, OnRank]], timeout: float = TIMEOUT, *, joined: bool = True
) -> list[list[Any]]:
    """Do as `run_ranks` for each world size and function, on ranks that are forked once for all of them."""
    works = [(size, functools.partial(_saved, function)) for size, function in runs]
    return [[_loaded(result) for result in results] for results in ranks.run_in_turn(works, timeout, joined=joined)]


def _saved(function: OnRank, rank: int) -> bytes:
    buffer = io.BytesIO()
    torch.save(function(rank), buffer)
    return buffer.getvalue()


def _loaded(result: bytes) -> Any:
    return torch.load(io.BytesIO(result), weights_only=True)
