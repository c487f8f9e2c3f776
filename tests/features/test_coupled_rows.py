"""Batches whose rows change one another in ComfyUI's own forward are computed together, as ComfyUI does."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from safetensors.torch import save_file

from scripts.comfyui import ComfyUI
from tests.support.graphs.comfyui import TOKENS, LatentOf, graph_of, save_families, save_latent, spread
from tests.support.graphs.diffusers import refused
from tests.support.graphs.family_checks import assert_stock
from tests.support.graphs.flux import UNKNOWN_WRAPPER, Graph, insert_after, node, step_by_step
from tests.support.graphs.sound import assert_same, both, sound_graph
from tests.support.selection import thorough
from tests.support.tiny.comfyui import TINY
from tests.support.tiny.models import draw

APART = {"data 2": {"data": 2}, "cfg 2": {"cfg": 2}}


@pytest.fixture(scope="module", autouse=True)
def _files(comfyui: ComfyUI) -> None:
    save_families(comfyui, "ltxav", "hunyuan_i2v")
    save_latent(comfyui, "two-videos", 2, 128, 3, 5, 4)
    save_latent(comfyui, "two-sounds", 2, 8, 11, 16)
    save_latent(comfyui, "hunyuan_i2v", 1, *TINY["hunyuan_i2v"].latent)
    for side in TOKENS:  # prompts of one length, which ComfyUI computes in one call
        [(cond, options)] = TINY["hunyuan_i2v"].prompt(7, seed=len(side))
        save_file({"cond": cond, **options}, comfyui.input_dir / f"alike-{side}.safetensors")
    frame = {
        "guiding_frame_index": torch.tensor(0.0),
        "concat_latent_image": draw(1, 16, 3, 8, 10, seed=22),
        "concat_mask": torch.ones(1, 1, 3, 8, 10),
    }
    save_file(frame, comfyui.input_dir / "alike-frame.safetensors")


def two_masks() -> Graph:
    """Return a graph of LTX-2 with two videos: the sound of one is generated in full, the sound of the other in part."""
    size = {"width": 16, "height": 11, "batch_size": 1}
    latents = {kind: node("LoadLatent", latent=f"two-{kind}s.latent") for kind in ("video", "sound")}
    graph = sound_graph("ltxav", steps=2) | latents
    return insert_after(graph, "sound", "SetLatentNoiseMask", "samples", mask=["masks", 0]) | {
        "anew": node("EmptyImage", **size, color=0xFFFFFF),
        "in part": node("EmptyImage", **size, color=0x666666),
        "images": node("ImageBatch", image1=["anew", 0], image2=["in part", 0]),
        "masks": node("ImageToMask", image=["images", 0], channel="red"),
    }


def two_guidances() -> Graph:
    """Return a graph of HunyuanVideo from a first frame, with more guidance in the positive prompt than in the negative one."""
    graph = graph_of("hunyuan_i2v", steps=2)
    for side in TOKENS:
        graph[side] = node("LoadConditioning", conditioning=f"alike-{side}.safetensors")
        graph = insert_after(graph, side, "PackPrompt", "conditioning", file="alike-frame.safetensors")
    return insert_after(graph, "positive", "FluxGuidance", "conditioning", guidance=60.0)


@pytest.mark.parametrize(
    "way",
    [
        "loop",
        # in the quick run engine/test_products computes coupled rows one model call at a time
        pytest.param(UNKNOWN_WRAPPER, marks=thorough),
    ],
)
def test_sounds_with_different_masks_in_one_batch_give_the_stock_latent(comfyui: ComfyUI, way: str) -> None:
    """LTX-2 uses the batch's largest noise level between video and sound, so automatic plans do not divide the batch."""
    graph = two_masks() if way == "loop" else step_by_step(two_masks())
    assert_same(comfyui, spread(graph, "cpu:2", strict=way == "loop"), both(comfyui, graph)[:2], way)


@thorough  # in the quick run models/test_rows_apart knows this class, and the sounds' rows stay together
@pytest.mark.parametrize("changed", [copy.copy, step_by_step], ids=["loop", "one call at a time"])
def test_prompts_with_different_guidance_give_the_stock_latent(
    latent_of: LatentOf, changed: Callable[[Graph], Graph]
) -> None:
    """HunyuanVideo adds one prompt's guidance to both rows' first frames, and the other's to both rows' other frames."""
    assert_stock(latent_of, changed(two_guidances()), strict=changed is not step_by_step, ulysses=2)


@pytest.mark.parametrize("plan", APART)
def test_a_plan_that_computes_coupled_rows_separately_is_refused(comfyui: ComfyUI, plan: str) -> None:
    for graph, what, kind in ((two_masks(), "noise masks", "LTXAV"), (two_guidances(), "guidance", "HunyuanVideoI2V")):
        degrees = {"cfg": 1, "data": 1} | APART[plan]
        assert refused(comfyui, spread(graph, "cpu:2", **APART[plan])) == (
            f"the {what} of this batch differ, and {kind} models then mix the rows of the batch, but cfg {degrees['cfg']} and "
            f"data {degrees['data']} would compute them on different GPUs: choose cfg 1 and data 1 in Parallel Plan, and "
            "ulysses, ring or pipefusion instead."
        )
