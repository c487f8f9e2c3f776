"""Wan through Load Parallel Diffusion Model, against the stock loader in the same ComfyUI."""

from __future__ import annotations

from typing import Any

import pytest

from scripts.comfyui import ComfyUI
from tests.support.graphs.comfyui import LatentOf, graph_of, save_families
from tests.support.graphs.family_checks import assert_stale_patches_depend_on_patches_and_warmup_alone, assert_stock
from tests.support.graphs.flux import insert_after_model, node
from tests.support.selection import thorough


@pytest.fixture(scope="module")
def wan_latent_of(comfyui: ComfyUI, latent_of: LatentOf) -> LatentOf:
    save_families(comfyui, "wan")
    return latent_of


def test_the_automatic_plan_gives_the_stock_result(wan_latent_of: LatentOf) -> None:
    assert_stock(wan_latent_of, graph_of("wan"))


@pytest.mark.parametrize("plan", [{"devices": "cpu:3", "ring": 3}, {"devices": "cpu:2", "weights": "sharded"}])
def test_every_kind_of_split_gives_the_stock_result(plan: dict[str, Any], wan_latent_of: LatentOf) -> None:
    assert_stock(wan_latent_of, graph_of("wan"), **plan)


def test_a_shift_of_the_schedule_and_a_batch_give_the_stock_result(wan_latent_of: LatentOf) -> None:
    """Stock nodes shift the schedule and make the batch."""
    graph = insert_after_model(graph_of("wan"), "ModelSamplingSD3", shift=8.0)
    graph["latent"] = node("EmptyHunyuanLatentVideo", width=80, height=72, length=5, batch_size=2)
    assert_stock(wan_latent_of, graph)


STALE = {
    "rows": {},
    "frames": {"latent": node("EmptyHunyuanLatentVideo", width=64, height=48, length=21, batch_size=1)},
}


@pytest.mark.parametrize("case", ["rows", pytest.param("frames", marks=thorough)])
def test_stale_patches_depend_only_on_patches_and_warmup(case: str, wan_latent_of: LatentOf) -> None:
    assert_stale_patches_depend_on_patches_and_warmup_alone(wan_latent_of, graph_of("wan", steps=4) | STALE[case])
