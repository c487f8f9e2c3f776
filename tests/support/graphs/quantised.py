"""Quantised files of ComfyUI's own models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from tests.support.graphs.comfyui import TOLERANCE, spread
from tests.support.graphs.flux import Graph
from tests.support.latents import relative_error

ROUNDED = ("int8", "int8_rows", "int8_convrot", "w4a4")
"""Formats whose layers round their inputs. The last bit of an input decides the rounding, and later layers amplify it."""
LatentOf = Callable[[Graph], Tensor]


def file_name(name: str, form: str) -> str:
    """Return a file name that no other test writes: results are cached by graph, and a graph has only the file's name."""
    return f"{name}-quantised-{form}.safetensors"


def distance(latent_of: LatentOf, graph: Graph, exact: Graph, plan: dict[str, Any], form: str) -> None:
    """Assert that several ranks give the stock loader's result.

    A format that rounds has a weaker check: the result may be 1.5 times as far from the exact result as the stock one.
    """
    ours, stock = latent_of(spread(graph, **plan)), latent_of(graph)
    error = relative_error(ours, stock)
    print(f"{form}: {error:.2g} from ComfyUI's", end=" ")
    if form not in ROUNDED:
        assert error <= TOLERANCE
        return
    best = latent_of(exact)
    print(f"{relative_error(ours, best):.3g} and {relative_error(stock, best):.3g} from fp32")
    assert relative_error(ours, best) <= 1.5 * relative_error(stock, best)
