"""FLUX.1 through Load Parallel Diffusion Model, against the stock loader in the same ComfyUI."""

from __future__ import annotations

from typing import Any

import pytest

from scripts.comfyui import ComfyUI
from tests.support.graphs.comfyui import FLUX1, TOKENS, LatentOf, graph_of, save_latent
from tests.support.graphs.family_checks import assert_references, assert_stock
from tests.support.selection import thorough
from tests.support.tiny.flux import save_conditioning


@pytest.fixture(scope="module", autouse=True)
def _files(comfyui: ComfyUI) -> None:
    for side, tokens in TOKENS.items():
        save_conditioning(comfyui.input_dir / f"{FLUX1}-{side}.safetensors", tokens)
    save_latent(comfyui, "reference-flux1", 1, 16, 7, 5)


def test_the_automatic_plan_gives_the_stock_result(latent_of: LatentOf) -> None:
    assert_stock(latent_of, graph_of(FLUX1))


@thorough
@pytest.mark.parametrize(
    "plan",
    [
        {"devices": "cpu:3", "ring": 3},
        {"devices": "cpu:2", "pipefusion": 2, "warmup_steps": 99},
        {"devices": "cpu:2", "weights": "sharded"},
    ],
)
def test_every_kind_of_split_gives_the_stock_result(plan: dict[str, Any], latent_of: LatentOf) -> None:
    assert_stock(latent_of, graph_of(FLUX1), **plan)


def test_references_give_the_stock_latent(latent_of: LatentOf) -> None:
    """The references are Kontext's."""
    assert_references(latent_of, FLUX1, "reference-flux1")
