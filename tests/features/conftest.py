"""The comparison of a graph on workers with the graph of the stock loader, and the log of its run."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from scripts.comfyui import ComfyUI
from tests.support.graphs.comfyui import TOLERANCE
from tests.support.graphs.flux import Graph, beside, queue_logged
from tests.support.latents import relative_error, saved_latent

EqualLatents = Callable[[Graph, Graph], str]


@pytest.fixture
def assert_equal_latents(comfyui: ComfyUI) -> EqualLatents:
    """Provide a function that asserts that a graph gives the latent of a stock graph, and returns the log of their run."""

    def compare(graph: Graph, stock: Graph) -> str:
        run, log = queue_logged(comfyui, beside(graph, stock))
        error = relative_error(saved_latent(comfyui, run.check()), saved_latent(comfyui, run, "stock save"))
        print(f"off by {error:.1e}")
        assert error <= TOLERANCE
        return log

    return compare
