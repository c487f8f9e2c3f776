"""Chroma's modulation, at the width that ComfyUI assumes."""

from __future__ import annotations

from typing import Any

import pytest

from scripts.comfyui import ComfyUI
from tests.support.graphs.comfyui import LatentOf
from tests.support.graphs.family_checks import assert_stock
from tests.support.graphs.wide import save_wide_with_prompts, wide
from tests.support.selection import thorough

pytestmark = thorough


@pytest.fixture(scope="module", autouse=True)
def _files(comfyui: ComfyUI) -> None:
    save_wide_with_prompts(comfyui, "wide_chroma")


@pytest.mark.parametrize("plan", [{"devices": "cpu:2", "pipefusion": 2, "warmup_steps": 99}, {"devices": "cpu:2"}])
def test_modulation_for_all_blocks_gives_the_stock_latent(plan: dict[str, Any], latent_of: LatentOf) -> None:
    """A network outside the blocks computes the modulation."""
    assert_stock(latent_of, wide("wide_chroma"), **plan)
