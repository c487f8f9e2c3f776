"""Latents that graphs save, and the relative error between two latents."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from safetensors.torch import load_file
from torch import Tensor

from scripts.comfyui import ComfyUI, Graph, QueuedRun

Result = TypeVar("Result")


def cached_by_graph(run: Callable[[Graph], Result]) -> Callable[[Graph], Result]:
    """Return the function with its results cached by graph."""
    done: dict[str, Result] = {}

    def cached(graph: Graph) -> Result:
        key = repr(graph)
        if key not in done:
            done[key] = run(graph)
        return done[key]

    return cached


@functools.cache
def latents(server: ComfyUI) -> Callable[[Graph], Tensor]:
    """Return a function that runs a graph and returns the latent (fp64) that its node "save" wrote. Results are cached."""
    return cached_by_graph(lambda graph: saved_latent(server, server.queue(graph, timeout=300).check()))


def saved_latent(server: ComfyUI, run: QueuedRun, node_id: str = "save") -> Tensor:
    """Return the latent that a SaveLatent node of a run wrote, in fp64."""
    (file,) = server.files(run, node_id)
    return load_file(Path(file))["latent_tensor"].double()


def relative_error(result: Tensor, reference: Tensor) -> float:
    """Return the relative L2 error. NaN counts as infinite."""
    assert result.shape == reference.shape
    error = ((result - reference).norm() / reference.norm()).item()
    return error if error == error else float("inf")
