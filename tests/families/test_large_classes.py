"""Models that ComfyUI takes to be too large for a test, in a ComfyUI that can be told otherwise.

It is a copy of the real one whose detection also looks for sizes in a file's metadata, as ComfyUI's own does for Wan and
LTX-Video. Both loaders and the workers use that copy, of which all else is as it was. In ComfyUI's detection HiDream has 17
billion parameters, Mochi 10, ERNIE-Image 8 and OmniGen 2 four; of the others blocks may be left out, but a block has a hundred
million or more. The VAE of HunyuanVideo has a quarter of a billion, that of HunyuanImage 2.1 0.4, of Wan 2.2 0.7 and of
HunyuanVideo 1.5 more than one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from PIL import Image

from scripts.comfyui import ComfyUI
from tests.support.copies.sized import sized_copy
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
from tests.support.graphs.family_tests import Families, Given, Layers, save_with_loras
from tests.support.graphs.flux import insert_after, node
from tests.support.graphs.vae import decode, encode, parallel, pixels
from tests.support.latents import latents, relative_error, saved_latent
from tests.support.selection import thorough
from tests.support.tiny.models import draw
from tests.vae.comfy_vaes import KINDS, save_comfy_vae

pytestmark = thorough

LAYERS: Layers = {
    "hidream": (
        "double_stream_blocks.0.block.attn1.to_q",
        "double_stream_blocks.1.block.ff_t.w2",
        "single_stream_blocks.0.block.ff_i.shared_experts.w1",
        "caption_projection.0.linear",
        "final_layer.linear",
    ),
    "lumina": (
        "layers.0.attention.qkv",
        "layers.1.feed_forward.w2",
        "context_refiner.0.attention.out",
        "final_layer.linear",
    ),
    "radiance": ("double_blocks.0.img_attn.qkv", "double_blocks.0.txt_mlp.0", "single_blocks.0.linear1"),
    "mochi": ("blocks.0.attn.qkv_x", "blocks.1.mlp_x.w1", "blocks.2.attn.proj_x", "t5_yproj", "final_layer.linear"),
    "omnigen2": (
        "layers.0.attn.to_q",
        "layers.1.feed_forward.linear_2",
        "noise_refiner.0.attn.to_k",
        "ref_image_refiner.1.feed_forward.linear_1",
        "context_refiner.0.attn.to_out.0",
        "norm_out.linear_2",
    ),
    "boogu": (
        "double_stream_layers.0.img_instruct_attn.processor.img_to_q",
        "single_stream_layers.0.attn.to_k",
        "noise_refiner.0.feed_forward.linear_1",
    ),
    "ernie": ("layers.0.self_attention.to_q", "layers.2.mlp.linear_fc2", "adaLN_modulation.1", "final_linear"),
    "auraflow": ("double_layers.0.attn.w1q", "single_layers.0.mlp.c_fc1", "cond_seq_linear"),
    "ideogram": ("layers.0.attention.qkv", "layers.1.feed_forward.w2", "input_proj"),
    "mage_flow": ("transformer_blocks.0.attn.to_q", "transformer_blocks.1.attn.add_k_proj", "img_in"),
}

GIVEN: Mapping[str, Given] = {
    "hidream, a picture to edit": Given("hidream", {"concat_latent_image": draw(1, 16, 10, 14, seed=51)}),
    "omnigen 2, references": Given("omnigen2", references=((16, 6, 5), (16, 3, 4))),
    "boogu, a reference": Given("boogu", references=((16, 6, 5),), sides=("positive",)),
    "mage-flow, references": Given("mage_flow", references=((128, 3, 5), (128, 2, 2)), sides=("positive",)),
}

VAE_SIZES = """

_made = VAE.__init__


def _sized(of_a_kind, sizes):
    def change(settings):
        if "num_res_blocks" in settings:
            settings |= sizes
        for inner in settings.values():
            if isinstance(inner, dict):
                change(inner)
        return settings

    return lambda **settings: of_a_kind(**change(settings))


def _with_sizes(self, sd=None, device=None, config=None, dtype=None, metadata=None):
    global AutoencoderKL, AutoencodingEngine
    known = AutoencoderKL, AutoencodingEngine, comfy.ldm.wan.vae2_2.WanVAE
    sizes = json.loads((metadata or {}).get("sizes", "{}"))
    AutoencoderKL, AutoencodingEngine, comfy.ldm.wan.vae2_2.WanVAE = (_sized(kind, sizes) for kind in known)
    try:
        _made(self, sd, device, config, dtype, metadata)
    finally:
        AutoencoderKL, AutoencodingEngine, comfy.ldm.wan.vae2_2.WanVAE = known


VAE.__init__ = _with_sizes
"""

VAES = ("wan22", "hunyuan", "hunyuan15", "hunyuan_image")
PICTURES: Mapping[str, tuple[str, dict[str, Any]]] = {
    "wan_i2v": ("wan", node("WanImageToVideo", width=80, height=64, length=9, batch_size=1)),
    "wan22_5b": ("wan22", node("Wan22ImageToVideoLatent", width=96, height=64, length=9, batch_size=1)),
    "hunyuan15": ("hunyuan15", node("HunyuanVideo15ImageToVideo", width=80, height=64, length=9, batch_size=1)),
}
"""Models that are given a picture to begin with, with the VAE that encodes it and the node."""


@pytest.fixture(scope="module")
def comfyui(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ComfyUI]:
    """The copy, with the models, their prompts and their LoRAs."""
    folder = tmp_path_factory.mktemp("sized")
    server = sized_copy(folder, sd=VAE_SIZES)
    save_with_loras(server, LAYERS)
    for name in (*VAES, "wan"):
        save_comfy_vae(server.base_dir / "models" / "vae" / f"{name}.safetensors", name)
        save_latent(server, f"of-{name}", *KINDS[name].latent)
    save_families(server, *PICTURES)
    noise = torch.randint(0, 256, (4, 5, 3), generator=torch.Generator().manual_seed(1), dtype=torch.uint8).numpy()
    Image.fromarray(noise).resize((80, 64), Image.Resampling.NEAREST).save(server.input_dir / "first.png")
    with server:
        yield server


@pytest.fixture(scope="module")
def latent_of(comfyui: ComfyUI) -> LatentOf:
    return latents(comfyui)


class TestSized(Families):
    layers = LAYERS
    given = GIVEN
    refused = (("radiance", "pipefusion 2"),)  # host/refused_inputs.py


@pytest.mark.parametrize("workers", [2, 3, 4])
@pytest.mark.parametrize("name", VAES)
def test_vaes(name: str, workers: int, comfyui: ComfyUI) -> None:
    graph = decode(name, f"of-{name}")
    assert relative_error(pixels(comfyui, parallel(graph, workers)), pixels(comfyui, graph)) <= TOLERANCE
    graph = encode(name, f"of-{name}")
    ours, theirs = (saved_latent(comfyui, comfyui.queue(g).check()) for g in (parallel(graph, workers), graph))
    assert relative_error(ours, theirs) <= TOLERANCE


@pytest.mark.parametrize("name", PICTURES)
def test_a_first_frame_encoded_by_a_parallel_vae(name: str, latent_of: LatentOf) -> None:
    vae, making = PICTURES[name]
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
