"""Unsharded classes other than Stable Diffusion 1.5 and SDXL: the stock loader's result, or the reason of the refusal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Type
from safetensors.torch import load_file, save_file

from scripts.comfyui import ComfyUI
from tests.support.graphs.comfyui import DIFFERENT, TOLERANCE, LatentOf, graph_of, spread
from tests.support.graphs.diffusers import refused
from tests.support.graphs.family_checks import assert_matters_and_stock, assert_stock
from tests.support.graphs.family_tests import save_with_prompts
from tests.support.graphs.flux import Graph, controlled, insert_after, node
from tests.support.graphs.quantised import distance, file_name
from tests.support.graphs.unsharded import SPLITS
from tests.support.latents import relative_error
from tests.support.selection import pairwise, thorough
from tests.support.tiny.comfyui import TINY
from tests.support.tiny.controlnet import save_t2i_adapter
from tests.support.tiny.formats import quantise
from tests.support.tiny.models import draw
from tests.support.tiny.quantised import save_quantised

CLASSES = ("inpaint", "ip2p", "lotus", "sd20", "sdxl_refiner", "hunyuan3d")
FRAMES = 5

VIDEOS: Mapping[str, Mapping[str, torch.Tensor]] = {
    "svd": {},
    "sv3d_u": {},
    "sv3d_p": {"elevation": torch.arange(5.0), "azimuth": 72 * torch.arange(5.0)},
}
"""Classes whose frames are the batch, and the further tensors of their prompts besides the first frame."""

PICTURED = {"unclip_l": 768, "unclip_h": 1024, "sdxl": 1280}
"""Classes for which unCLIPConditioning is made, and the width of a picture's embedding."""

pytestmark = thorough


@pytest.fixture(scope="module", autouse=True)
def _files(comfyui: ComfyUI) -> None:
    for name in (*CLASSES, *VIDEOS, *PICTURED, "x4", "hunyuan3d21"):
        save_with_prompts(comfyui, name)
        batch = FRAMES if name in VIDEOS else 2
        tensors = {
            "latent_tensor": draw(batch, *TINY[name].latent, seed=3),
            "latent_format_version_0": torch.tensor([]),
        }
        save_file(tensors, comfyui.input_dir / f"{name}-batch.latent")
    for name, tensors in VIDEOS.items():
        first = {"concat_latent_image": draw(1, 4, 8, 12, seed=4), **tensors}
        save_file(first, comfyui.input_dir / f"{name}-first.safetensors")
    beside = {"concat_latent_image": draw(1, 4, 9, 14, seed=5), "concat_mask": torch.ones(1, 1, 9, 14).tril()}
    save_file(beside, comfyui.input_dir / "whole-beside.safetensors")


def batch_of(name: str, **settings: Any) -> Graph:
    """Return the class's graph for a batch of two."""
    return graph_of(name, steps=2, **settings) | {"latent": node("LoadLatent", latent=f"{name}-batch.latent")}


@pytest.mark.parametrize("split", SPLITS.values(), ids=SPLITS)
@pytest.mark.parametrize("name", CLASSES)
def test_every_split_gives_the_stock_result(name: str, split: dict[str, Any], latent_of: LatentOf) -> None:
    graph = batch_of(name)
    assert_stock(latent_of, graph, strict=False, **split)


@pairwise(name=tuple(VIDEOS), split=("cfg 2", "one worker"))
def test_a_video_whose_frames_are_the_batch_gives_the_stock_result_without_data_ranks(
    name: str, split: str, comfyui: ComfyUI, latent_of: LatentOf
) -> None:
    """The frames attend to one another, so each rank has all of them."""
    graph = batch_of(name)
    for side in ("positive", "negative"):
        graph = insert_after(graph, side, "PackPrompt", "conditioning", file=f"{name}-first.safetensors")
    assert_stock(latent_of, graph, strict=False, **SPLITS[split])
    said = refused(comfyui, spread(graph, strict=False, **SPLITS["data 2"]))
    assert said.startswith("data 2 is more than the batch of 1")


@pairwise(name=tuple(PICTURED), split=("data 2, cfg 2", "cfg 2"), noise=(0.0, 0.4))
def test_a_picture_instead_of_a_text_gives_the_stock_result(
    name: str, split: str, noise: float, latent_of: LatentOf
) -> None:
    """unCLIP has two pictures on one branch, and so the noise that ComfyUI draws when it merges them."""
    plain = batch_of(name) | {"shown": node("PackVision", width=PICTURED[name])}
    shown = {"clip_vision_output": ["shown", 0], "strength": 0.8, "noise_augmentation": noise}
    graph = insert_after(plain, "positive", "unCLIPConditioning", "conditioning", **shown)
    graph = insert_after(graph, "positive", "unCLIPConditioning", "conditioning", **shown | {"strength": 0.4})
    assert_matters_and_stock(latent_of, plain, graph, strict=False, **SPLITS[split])


@pytest.mark.parametrize("split", ["data 2, cfg 2", "cfg 2"])
@pytest.mark.parametrize("name", ["inpaint", "ip2p"])
def test_a_picture_next_to_the_latent_gives_the_stock_result(name: str, split: str, latent_of: LatentOf) -> None:
    """The latent also has a mask, as with InpaintModelConditioning; the graph runs in the workers' loop."""
    plain = batch_of(name)
    graph = plain
    for side in ("positive", "negative"):
        graph = insert_after(graph, side, "PackPrompt", "conditioning", file="whole-beside.safetensors")
    graph["mask"] = node("SolidMask", value=0.7, width=112, height=72)
    graph = insert_after(graph, "latent", "SetLatentNoiseMask", "samples", mask=["mask", 0])
    assert_matters_and_stock(latent_of, plain, graph, **SPLITS[split])


@pytest.mark.parametrize("split", ["data 2, cfg 2", "one worker"])
def test_an_upscaler_gives_the_stock_result(split: str, latent_of: LatentOf) -> None:
    """Stable Diffusion's upscaler gets a small picture with added noise."""
    graph = graph_of("x4", steps=2) | {
        "small": node("EmptyImage", width=24, height=16, batch_size=2, color=0x4080C0),
        "larger": node(
            "SD_4XUpscale_Conditioning",
            images=["small", 0],
            positive=["positive", 0],
            negative=["negative", 0],
            scale_ratio=4.0,
            noise_augmentation=0.3,
        ),
    }
    links = {"positive": ["larger", 0], "negative": ["larger", 1], "latent_image": ["larger", 2]}
    graph["sampler"]["inputs"] |= links
    assert_stock(latent_of, graph, strict=False, **SPLITS[split])


def test_a_class_that_swaps_the_halves_of_a_batch_is_not_divided(comfyui: ComfyUI, latent_of: LatentOf) -> None:
    graph = batch_of("hunyuan3d21")
    assert "computes the rows of a batch together" in refused(comfyui, spread(graph, strict=False, **SPLITS["cfg 2"]))
    assert_stock(latent_of, graph, strict=False, **SPLITS["one worker"])


def test_stable_diffusion_of_the_real_width_and_a_t2i_adapter_give_the_stock_result(
    comfyui: ComfyUI, latent_of: LatentOf
) -> None:
    """The model has all its blocks, in fp8 weights that compute in fp32.

    The adapter's output is added to the inputs of the model's blocks, for both branches of a step.
    """
    save_with_prompts(comfyui, "wide_sd15")
    save_t2i_adapter(comfyui.base_dir / "models" / "controlnet" / "t2i.safetensors")
    plain = graph_of("wide_sd15", steps=1)
    plain["model"]["inputs"]["weight_dtype"] = "fp8_e4m3fn"
    assert_stock(latent_of, plain, cfg=2)
    control = {
        "net": node("ControlNetLoader", control_net_name="t2i.safetensors"),
        "image": node("EmptyImage", width=112, height=72, batch_size=1, color=0x4080C0),
    }
    assert_matters_and_stock(latent_of, plain, controlled(plain | control, strength=0.7), strict=False, cfg=2)


@pytest.mark.parametrize("form", ["fp8", "int8_convrot"])  # ComfyUI's own loader fails on a UNet in nvfp4
def test_quantised_weights_of_sdxl_are_as_precise_as_in_comfyui(
    form: str, comfyui: ComfyUI, latent_of: LatentOf
) -> None:
    """SDXL in ComfyUI's formats gives ComfyUI's own bits on one rank, and is no further from fp32 on two."""
    folder = comfyui.base_dir / "models" / "diffusion_models"
    save_quantised(folder / file_name("sdxl", form), load_file(folder / "sdxl.safetensors"), form)
    plain, graph = batch_of("sdxl"), batch_of("sdxl")
    graph["model"]["inputs"]["unet_name"] = file_name("sdxl", form)
    assert relative_error(latent_of(graph), latent_of(plain)) > DIFFERENT
    assert torch.equal(latent_of(spread(graph, "cpu:1")), latent_of(graph))
    distance(latent_of, graph, plain, SPLITS["cfg 2"], form)


def test_weights_of_gguf_give_the_stock_result_of_their_values(comfyui: ComfyUI, latent_of: LatentOf) -> None:
    """ComfyUI itself does not read GGUF, and runs the same values from another file."""
    folder = comfyui.base_dir / "models" / "diffusion_models"
    tensors = load_file(folder / "sdxl.safetensors")
    quantise(folder / "sdxl-q8.gguf", folder / "sdxl-of-q8.safetensors", Type.Q8_0, tensors)
    graph, ours = batch_of("sdxl"), batch_of("sdxl")
    graph["model"]["inputs"]["unet_name"] = "sdxl-of-q8.safetensors"
    ours["model"]["inputs"]["unet_name"] = "sdxl-q8.gguf"
    assert relative_error(latent_of(spread(ours, **SPLITS["cfg 2"])), latent_of(graph)) <= TOLERANCE
