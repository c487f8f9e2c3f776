"""Z-Image's padded tokens, at the width that ComfyUI assumes."""

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
    save_wide_with_prompts(comfyui, "wide_z_image")


@pytest.mark.parametrize("plan", [{"devices": "cpu:2"}, {"devices": "cpu:2", "weights": "sharded", "ring": 2}])
def test_padded_tokens_give_the_stock_result(plan: dict[str, Any], latent_of: LatentOf) -> None:
    assert_stock(latent_of, wide("wide_z_image"), **plan)
