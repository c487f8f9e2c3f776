"""Classes that run whole, other than Stable Diffusion 1.5 and SDXL: the stock loader's result, or the reason why not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from scripts.comfyui import ComfyUI
from tests.host.comfy_graphs import TOLERANCE, LatentOf, graph_of, spread
from tests.host.conftest import relative_error
from tests.host.graphs import Graph, insert_after, node
from tests.host.more_families import save_with_prompts
from tests.host.test_families import refused
from tests.host.test_whole import SPLITS
from tests.selection import thorough
from tests.tiny_comfy import TINY
from tests.tiny_models import draw

CLASSES = ("inpaint", "ip2p", "lotus", "sd20", "sdxl_refiner", "hunyuan3d")
FRAMES = 5

pytestmark = thorough


@pytest.fixture(scope="module", autouse=True)
def _files(comfyui: ComfyUI) -> None:
    for name in (*CLASSES, "svd", "hunyuan3d21"):
        save_with_prompts(comfyui, name)
        batch = FRAMES if name == "svd" else 2
        tensors = {
            "latent_tensor": draw(batch, *TINY[name].latent, seed=3),
            "latent_format_version_0": torch.tensor([]),
        }
        save_file(tensors, comfyui.input_dir / f"{name}-batch.latent")
    save_file({"concat_latent_image": draw(1, 4, 8, 12, seed=4)}, comfyui.input_dir / "svd-first.safetensors")


def batch_of(name: str, **settings: Any) -> Graph:
    """The class's job for a batch of two."""
    return graph_of(name, steps=2, **settings) | {"latent": node("LoadLatent", latent=f"{name}-batch.latent")}


@pytest.mark.parametrize("split", SPLITS.values(), ids=SPLITS)
@pytest.mark.parametrize("name", CLASSES)
def test_every_split_gives_the_stock_result(name: str, split: dict[str, Any], latent_of: LatentOf) -> None:
    graph = batch_of(name)
    assert relative_error(latent_of(spread(graph, strict=False, **split)), latent_of(graph)) <= TOLERANCE


@pytest.mark.parametrize("split", ["cfg 2", "one worker"])
def test_a_video_whose_frames_are_the_batch(split: str, comfyui: ComfyUI, latent_of: LatentOf) -> None:
    """Stable Video Diffusion: its frames attend to each other, so that a rank has all of them."""
    graph = batch_of("svd")
    for side in ("positive", "negative"):
        graph = insert_after(graph, side, "PackPrompt", "conditioning", file="svd-first.safetensors")
    assert relative_error(latent_of(spread(graph, strict=False, **SPLITS[split])), latent_of(graph)) <= TOLERANCE
    said = refused(comfyui, spread(graph, strict=False, **SPLITS["data 2"]))
    assert said.startswith("data 2 is more than the batch of 1")


def test_a_class_that_swaps_the_halves_of_a_batch_is_not_split(comfyui: ComfyUI, latent_of: LatentOf) -> None:
    graph = batch_of("hunyuan3d21")
    assert "computes the rows of a batch together" in refused(comfyui, spread(graph, strict=False, **SPLITS["cfg 2"]))
    assert relative_error(latent_of(spread(graph, strict=False, **SPLITS["one worker"])), latent_of(graph)) <= TOLERANCE


def test_stable_diffusion_at_its_width(comfyui: ComfyUI, latent_of: LatentOf) -> None:
    """All its blocks, in fp8 that is computed in fp32."""
    save_with_prompts(comfyui, "wide_sd15")
    graph = graph_of("wide_sd15", steps=2)
    graph["model"]["inputs"]["weight_dtype"] = "fp8_e4m3fn"
    assert relative_error(latent_of(spread(graph, cfg=2)), latent_of(graph)) <= TOLERANCE
