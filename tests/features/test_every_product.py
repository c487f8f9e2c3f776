"""Every product of two, three and four workers for families of ComfyUI's own models, against the stock loader."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from scripts.comfyui import ComfyUI
from tests.support.graphs.comfyui import TOLERANCE, LatentOf, graph_of, save_families, save_latent, spread
from tests.support.latents import relative_error
from tests.support.selection import thorough
from tests.support.tiny.comfyui import TINY
from tests.support.tiny.family import HEADS

pytestmark = thorough

BLOCKS: Mapping[str, int] = {"flux2": 3, "wan": 3, "wan_i2v": 3, "wan22_5b": 3, "vace": 4}
"""The families that ComfyUI recognises in a tiny file, and the largest number of stages of each."""


def plans() -> Iterator[dict[str, Any]]:
    """Yield all products that the heads allow, with a warm-up over all steps; those without stages also with sharded weights."""
    for workers in (2, 3, 4):
        for degrees in itertools.product((1, 2), *[range(1, workers + 1)] * 3):
            cfg, pipefusion, ring, ulysses = degrees
            if math.prod(degrees) != workers or ulysses > HEADS:
                continue
            plan = {"devices": f"cpu:{workers}", "cfg": cfg, "pipefusion": pipefusion, "ring": ring, "ulysses": ulysses}
            yield plan | {"warmup_steps": 99}
            if pipefusion == 1:
                yield plan | {"weights": "sharded"}


def name_of(plan: Any) -> str | None:
    """Return the degrees above 1 as the test's id, for example `cfg 2 ring 2`."""
    if not isinstance(plan, dict):
        return None
    degrees = (f"{name} {plan[name]}" for name in ("cfg", "pipefusion", "ring", "ulysses") if plan[name] > 1)
    return " ".join([*degrees, *([plan["weights"]] if "weights" in plan else [])])


@pytest.fixture(scope="module", autouse=True)
def _files(comfyui: ComfyUI) -> None:
    save_families(comfyui, *BLOCKS)
    save_latent(comfyui, "wan22_5b", 1, *TINY["wan22_5b"].latent)


@pytest.mark.parametrize(
    ("name", "plan"),
    [(name, plan) for plan in plans() for name, blocks in BLOCKS.items() if plan["pipefusion"] <= blocks],
    ids=name_of,
)
def test_every_product_gives_the_stock_result(name: str, plan: dict[str, Any], latent_of: LatentOf) -> None:
    graph = graph_of(name, steps=2)
    assert relative_error(latent_of(spread(graph, **plan)), latent_of(graph)) <= TOLERANCE
