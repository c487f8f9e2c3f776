"""Checks that the tests of several families share."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from scripts.comfyui import ComfyUI, QueuedRun
from tests.support.graphs.comfyui import (
    DIFFERENT,
    TOLERANCE,
    LatentOf,
    spread,
)
from tests.support.graphs.flux import Graph, queue_logged, ways
from tests.support.latents import relative_error, saved_latent


def assert_stock(latent_of: LatentOf, graph: Graph, *, strict: bool = True, **plan: Any) -> None:
    """Assert that a graph on workers gives the stock loader's result."""
    assert relative_error(latent_of(spread(graph, strict=strict, **plan)), latent_of(graph)) <= TOLERANCE


def assert_matters_and_stock(latent_of: LatentOf, plain: Graph, graph: Graph, **plan: Any) -> None:
    """Assert that a graph gives another picture than a plain one, and the stock result on workers."""
    assert relative_error(latent_of(plain), latent_of(graph)) > DIFFERENT
    assert_stock(latent_of, graph, **plan)


def assert_equal_run(
    server: ComfyUI, graph: Graph, stock: Tensor, way: str = "loop", timeout: float = 600
) -> tuple[QueuedRun, str]:
    """Run a graph on workers, and assert the stock latent and the way in which its denoise ran (`ways`).

    Return the run and the server's log of it.
    """
    run, log = queue_logged(server, graph, timeout)
    error = relative_error(saved_latent(server, run.check()), stock)
    print(f"off by {error:.1e}")
    assert error <= TOLERANCE
    assert ways(log) == [way]
    return run, log


def assert_stale_patches_depend_on_patches_and_warmup_alone(latent_of: LatentOf, graph: Graph) -> None:
    patches: dict[str, Any] = {"patches": 2, "warmup_steps": 1}
    one = latent_of(spread(graph, "cpu:1", pipefusion=1, **patches))
    two = latent_of(spread(graph, "cpu:2", pipefusion=2, **patches))
    four = latent_of(spread(graph, "cpu:4", pipefusion=2, ulysses=2, **patches))
    assert relative_error(two, one) <= TOLERANCE
    assert relative_error(four, one) <= TOLERANCE
    assert relative_error(one, latent_of(graph)) > TOLERANCE, "nothing was stale"
