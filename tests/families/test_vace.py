"""VACE through Load Parallel Diffusion Model, against the stock loader in the same ComfyUI."""

from __future__ import annotations

import pytest

from scripts.comfyui import ComfyUI
from tests.support.graphs.comfyui import LatentOf, graph_of, save_families
from tests.support.graphs.family_checks import assert_stock


@pytest.fixture(scope="module", autouse=True)
def _files(comfyui: ComfyUI) -> None:
    save_families(comfyui, "vace")


def test_the_automatic_plan_gives_the_stock_result(latent_of: LatentOf) -> None:
    assert_stock(latent_of, graph_of("vace"))


def test_every_kind_of_split_gives_the_stock_result(latent_of: LatentOf) -> None:
    """The plan divides the latent into patches."""
    assert_stock(latent_of, graph_of("vace"), pipefusion=2, warmup_steps=99)
