"""Latents that graphs save, and the relative error between two latents."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor

from scripts.comfyui import ComfyUI, Graph, QueuedRun


@functools.cache
def latents(server: ComfyUI) -> Callable[[Graph], Tensor]:
    """Return a function that runs a graph and returns the latent (fp64) that its node "save" wrote.

    Results are cached by graph.
    """
    done: dict[str, Tensor] = {}

    def latent(graph: Graph) -> Tensor:
        key = repr(graph)
        if key not in done:
            done[key] = saved_latent(server, server.queue(graph, timeout=300).check())
        return done[key]

    return latent


def saved_latent(server: ComfyUI, run: QueuedRun, node_id: str = "save") -> Tensor:
    """Return the latent that a SaveLatent node of a run wrote, in fp64."""
    (file,) = server.files(run, node_id)
    return load_file(Path(file))["latent_tensor"].double()


def relative_error(result: Tensor, reference: Tensor) -> float:
    """Return the relative L2 error. NaN counts as infinite."""
    assert result.shape == reference.shape
    error = ((result - reference).norm() / reference.norm()).item()
    return error if error == error else float("inf")
