"""LTX-Video through a real ComfyUI against its loader: splits, a LoRA, a first frame, masks and guides."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch

from scripts.comfyui import ComfyUI
from tests.support.graphs.comfyui import PLANS, TOLERANCE, LatentOf, graph_of, save_families, spread, with_guides
from tests.support.graphs.family_checks import assert_stock
from tests.support.graphs.family_tests import FamiliesGiven, Given
from tests.support.graphs.flux import node
from tests.support.latents import relative_error
from tests.support.selection import thorough


@pytest.fixture(scope="module", autouse=True)
def _files(comfyui: ComfyUI) -> None:
    save_families(comfyui, "ltxv")


class TestVideos(FamiliesGiven):
    layers: ClassVar = {
        "ltxv": (
            "transformer_blocks.0.attn1.to_q",
            "transformer_blocks.1.attn2.to_v",
            "transformer_blocks.1.ff.net.2",
            "caption_projection.linear_1",
            "proj_out",
        ),
    }
    given: ClassVar = {
        "ltx-video, first frame": Given("ltxv", mask=True),
        "ltx-video, frames a second": Given("ltxv", {"frame_rate": torch.tensor(12.5)}),
    }


def test_the_stock_result(latent_of: LatentOf) -> None:
    """Text is masked; it has what its file's header says."""
    assert_stock(latent_of, graph_of("ltxv"))


def test_image_to_video(latent_of: LatentOf) -> None:
    """It keeps what is outside a mask, and has a timestep for each token."""
    graph = graph_of("ltxv") | {
        "solid": node("SolidMask", value=1.0, width=160, height=128),
        "mask": node("FeatherMask", mask=["solid", 0], left=128, top=0, right=0, bottom=0),
        "masked": node("SetLatentNoiseMask", samples=["latent", 0], mask=["mask", 0]),
    }
    graph["sampler"]["inputs"]["latent_image"] = ["masked", 0]
    stock = latent_of(graph)
    assert relative_error(latent_of(graph_of("ltxv")), stock) > 0.01
    assert relative_error(latent_of(spread(graph)), stock) <= TOLERANCE


@thorough
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("strength", [1.0, 0.7])
def test_guides(comfyui: ComfyUI, strength: float, plan: dict[str, Any], latent_of: LatentOf) -> None:
    """One of less strength weighs attention between its tokens and the video's."""
    assert_stock(latent_of, with_guides(comfyui, graph_of("ltxv"), "latent", strength=strength), **plan)
