"""LTX-Video through a real ComfyUI against its own loader: splits, a LoRA, a first frame, masks and guides."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import save_file

from scripts.comfyui import ComfyUI
from tests.support.graphs.comfyui import PLANS, TOLERANCE, LatentOf, graph_of, save_families, spread, with_guides
from tests.support.graphs.family_checks import assert_stock
from tests.support.graphs.family_tests import Families, Given
from tests.support.graphs.flux import node, step_by_step
from tests.support.latents import relative_error
from tests.support.selection import thorough
from tests.support.tiny.comfyui import TINY


@pytest.fixture(scope="module", autouse=True)
def _files(comfyui: ComfyUI) -> None:
    save_families(comfyui, "ltxv")


class TestVideos(Families):
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


@pytest.mark.parametrize("plan", [{}, PLANS[1]], ids=["automatic", "pipefusion 2"])
def test_masked_text_gives_the_stock_result(plan: dict[str, Any], latent_of: LatentOf) -> None:
    """The text has a mask; the model has the settings of its file's header."""
    assert_stock(latent_of, graph_of("ltxv"), **plan)


def test_image_to_video_gives_the_stock_latent(latent_of: LatentOf) -> None:
    """The model keeps the latent outside the mask, and has a timestep for each token."""
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
def test_guides_give_the_stock_latents(
    comfyui: ComfyUI, strength: float, plan: dict[str, Any], latent_of: LatentOf
) -> None:
    """A guide of less strength weighs attention between its tokens and the video's."""
    assert_stock(latent_of, with_guides(comfyui, graph_of("ltxv"), "latent", strength=strength), **plan)


def test_a_guide_with_a_mask_next_to_other_masks_of_texts_gives_the_stock_latent(
    comfyui: ComfyUI, latent_of: LatentOf
) -> None:
    """One model call contains both texts, and is divided between them. The guide's mask applies to all rows."""
    graph = graph_of("ltxv")
    for side, hidden in (("positive", 2), ("negative", 3)):
        [(cond, options)] = TINY["ltxv"].prompt(7, seed=hidden)
        options["attention_mask"] = (torch.arange(7) < 7 - hidden).long()[None]
        save_file({"cond": cond, **options}, comfyui.input_dir / f"masked-{side}.safetensors")
        graph[side] = node("LoadConditioning", conditioning=f"masked-{side}.safetensors")
    graph["left"] = node("SolidMask", value=0.3, width=160, height=128)
    graph = step_by_step(with_guides(comfyui, graph, "latent", attention_mask=["left", 0]))
    assert_stock(latent_of, graph, strict=False, ulysses=2)
