"""Families and VAEs that are small only in a copy of ComfyUI that reads sizes from files, against its own loader.

Families with each split, a LoRA and references: AuraFlow, Boogu, Chroma Radiance, ERNIE-Image, HiDream, Ideogram 4, Lumina 2,
MageFlow, Mochi and OmniGen 2. VAEs of HunyuanImage 2.1, HunyuanVideo, HunyuanVideo 1.5 and Wan 2.2.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import pytest
import torch
from PIL import Image

from scripts.comfyui import ComfyUI
from tests.support.graphs.comfyui import (
    DIFFERENT,
    TOKENS,
    TOLERANCE,
    LatentOf,
    graph_of,
    save_families,
    save_latent,
    spread,
)
from tests.support.graphs.family_tests import Families, Given
from tests.support.graphs.flux import insert_after, node
from tests.support.graphs.vae import decode, encode, parallel, pixels
from tests.support.latents import relative_error, saved_latent
from tests.support.selection import thorough
from tests.support.tiny.models import draw
from tests.vae.comfy_vaes import KINDS, save_comfy_vae

PICTURES: Mapping[str, tuple[str, dict[str, Any]]] = {
    "wan_i2v": ("wan", node("WanImageToVideo", width=80, height=64, length=9, batch_size=1)),
    "wan22_5b": ("wan22", node("Wan22ImageToVideoLatent", width=96, height=64, length=9, batch_size=1)),
    "hunyuan15": ("hunyuan15", node("HunyuanVideo15ImageToVideo", width=80, height=64, length=9, batch_size=1)),
}
"""Models that start from a picture: the VAE that encodes the picture, and the node that takes it."""


@pytest.fixture(scope="module")
def comfyui(sized_comfyui: ComfyUI) -> ComfyUI:
    return sized_comfyui


class TestSized(Families):
    layers: ClassVar = {
        "auraflow": ("double_layers.0.attn.w1q", "single_layers.0.mlp.c_fc1", "cond_seq_linear"),
        "boogu": (
            "double_stream_layers.0.img_instruct_attn.processor.img_to_q",
            "single_stream_layers.0.attn.to_k",
            "noise_refiner.0.feed_forward.linear_1",
        ),
        "ernie": ("layers.0.self_attention.to_q", "layers.2.mlp.linear_fc2", "adaLN_modulation.1", "final_linear"),
        "hidream": (
            "double_stream_blocks.0.block.attn1.to_q",
            "double_stream_blocks.1.block.ff_t.w2",
            "single_stream_blocks.0.block.ff_i.shared_experts.w1",
            "caption_projection.0.linear",
            "final_layer.linear",
        ),
        "ideogram": ("layers.0.attention.qkv", "layers.1.feed_forward.w2", "input_proj"),
        "lumina": (
            "layers.0.attention.qkv",
            "layers.1.feed_forward.w2",
            "context_refiner.0.attention.out",
            "final_layer.linear",
        ),
        "mage_flow": ("transformer_blocks.0.attn.to_q", "transformer_blocks.1.attn.add_k_proj", "img_in"),
        "mochi": ("blocks.0.attn.qkv_x", "blocks.1.mlp_x.w1", "blocks.2.attn.proj_x", "t5_yproj", "final_layer.linear"),
        "omnigen2": (
            "layers.0.attn.to_q",
            "layers.1.feed_forward.linear_2",
            "noise_refiner.0.attn.to_k",
            "ref_image_refiner.1.feed_forward.linear_1",
            "context_refiner.0.attn.to_out.0",
            "norm_out.linear_2",
        ),
        "radiance": ("double_blocks.0.img_attn.qkv", "double_blocks.0.txt_mlp.0", "single_blocks.0.linear1"),
    }
    given: ClassVar = {
        "boogu, a reference": Given("boogu", references=((16, 6, 5),), sides=("positive",)),
        "hidream, a picture to edit": Given("hidream", {"concat_latent_image": draw(1, 16, 10, 14, seed=51)}),
        "mage-flow, references": Given("mage_flow", references=((128, 3, 5), (128, 2, 2)), sides=("positive",)),
        "omnigen 2, references": Given("omnigen2", references=((16, 6, 5), (16, 3, 4))),
    }
    refused = (("radiance", "pipefusion 2"),)  # tests/refusals/inputs.py tests the refusal


def save_vae(server: ComfyUI, name: str) -> None:
    save_comfy_vae(server.base_dir / "models" / "vae" / f"{name}.safetensors", name)


@thorough
@pytest.mark.parametrize("workers", [2, 3, 4])
@pytest.mark.parametrize("vae", ["hunyuan", "hunyuan15", "hunyuan_image", "wan22"])
def test_a_vae_gives_the_stock_pixels_and_latent(vae: str, workers: int, comfyui: ComfyUI) -> None:
    save_vae(comfyui, vae)
    save_latent(comfyui, f"of-{vae}", *KINDS[vae].latent)
    graph = decode(vae, f"of-{vae}")
    assert relative_error(pixels(comfyui, parallel(graph, workers)), pixels(comfyui, graph)) <= TOLERANCE
    graph = encode(vae, f"of-{vae}")
    ours, theirs = (saved_latent(comfyui, comfyui.queue(g).check()) for g in (parallel(graph, workers), graph))
    assert relative_error(ours, theirs) <= TOLERANCE


@thorough
@pytest.mark.parametrize("name", PICTURES)
def test_a_first_frame_encoded_by_a_parallel_vae_gives_the_stock_latent(
    name: str, comfyui: ComfyUI, latent_of: LatentOf
) -> None:
    vae, making = PICTURES[name]
    save_vae(comfyui, vae)
    save_families(comfyui, name)
    noise = torch.randint(0, 256, (4, 5, 3), generator=torch.Generator().manual_seed(1), dtype=torch.uint8).numpy()
    Image.fromarray(noise).resize((80, 64), Image.Resampling.NEAREST).save(comfyui.input_dir / "first.png")
    graph = graph_of(name, steps=2) | {
        "vae": node("VAELoader", vae_name=f"{vae}.safetensors"),
        "first": node("LoadImage", image="first.png"),
    }
    inputs, given = graph["sampler"]["inputs"], {"vae": ["vae", 0], "start_image": ["first", 0]}
    if name == "wan22_5b":
        inputs["latent_image"] = ["making", 0]
    else:
        given |= {side: [side, 0] for side in TOKENS}
        inputs |= {"positive": ["making", 0], "negative": ["making", 1], "latent_image": ["making", 2]}
    graph["making"] = node(making["class_type"], **making["inputs"], **given)
    stock = latent_of(graph)
    assert relative_error(latent_of(insert_after(graph, "first", "ImageInvert", "image")), stock) > DIFFERENT
    assert relative_error(latent_of(spread(parallel(graph), ring=2)), stock) <= TOLERANCE
