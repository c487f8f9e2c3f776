"""CogVideoX and PixArt through a real ComfyUI: stock nodes on our MODELs, against diffusers' pipelines."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKLCogVideoX, EulerDiscreteScheduler
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import pad

from scripts.comfyui import ComfyUI
from tests.support.graphs.comfyui import LatentOf
from tests.support.graphs.diffusers import CFG, SEED, STEPS, family_graph, refused, save_gguf
from tests.support.graphs.diffusers_checks import (
    SAMPLERS,
    TOLERANCE,
    WEIGHTS,
    assert_compiled,
    assert_folder,
    assert_loop,
    assert_lora,
    choosing,
    models_of,
    samplers,
    save_other_model,
)
from tests.support.graphs.flux import Graph, node
from tests.support.latents import relative_error
from tests.support.selection import thorough
from tests.support.tiny import cogvideox as tiny_cogvideox
from tests.support.tiny import pixart as tiny_pixart
from tests.support.tiny.models import draw
from tests.support.tiny.vae import REAL

ZERO_SNR = 1e-3
"""Largest relative error in the first step from a sigma of 4518, where diffusers has pure noise; measured 2e-4."""

FRAMES, HEIGHT, WIDTH, TEXT = 4, 6, 10, 7
SCALE = {"2b": 1.15258426, "5b": 0.7, "1.5": 0.7, "5b-i2v": 0.7, "1.5-i2v": 0.7}
QUICK_FILES = ("2b", "1.5", "1.5-i2v")
PROMPTS = {"video-positive": 2, "video-negative": 4}
"""Files of CogVideoX's prompts, and the seeds of their texts."""

PREFIX = "model.diffusion_model."
"""The prefix of the names in PixArt's file."""


@pytest.fixture(scope="module", autouse=True)
def _files(pytestconfig: pytest.Config, comfyui: ComfyUI) -> None:
    for kind in SCALE if pytestconfig.getoption("all") else QUICK_FILES:
        tiny_cogvideox.save_cogvideox(models_of(comfyui) / f"cogvideox-{kind}.safetensors", kind)
    pixels = np.random.default_rng(9).integers(0, 256, (8 * HEIGHT, 8 * WIDTH, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(comfyui.input_dir / "first-frame.png")
    for name, seed in PROMPTS.items():
        save_file(
            {"cond": draw(1, TEXT, tiny_cogvideox.TEXT_WIDTH, seed=seed)}, comfyui.input_dir / f"{name}.safetensors"
        )
    save_file({"cond": draw(1, TEXT, 33, seed=1)}, comfyui.input_dir / "video-wide.safetensors")
    tiny_pixart.save_pixart(models_of(comfyui) / "pixart.safetensors", prefix=PREFIX)
    for name, (text, mask) in zip(("picture-positive", "picture-negative"), pixart_prompts(), strict=True):
        save_file({"cond": text, "attention_mask": mask}, comfyui.input_dir / f"{name}.safetensors")


def video(kind: str, *, length: int = 4 * FRAMES - 3, **settings: Any) -> Graph:
    size = {"width": 16 * (WIDTH // 2), "height": 16 * (HEIGHT // 2), "length": length, "batch_size": 1}
    latent = node("EmptyHunyuanLatentVideo", **size)
    return family_graph("LoadParallelCogVideoX", f"cogvideox-{kind}", "video", latent, **settings)


def image_to_video(kind: str, vae: str, **settings: Any) -> Graph:
    """Return the graph of `video` from a picture by stock nodes, with a parallel VAE."""
    graph = video(kind, **settings)
    prompts = {"positive": ["positive", 0], "negative": ["negative", 0]}
    graph |= {
        "vae": node("LoadParallelVAE", vae_name=vae, plan=["plan", 0]),
        "picture": node("LoadImage", image="first-frame.png"),
        "prompts": node("InstructPixToPixConditioning", **prompts, vae=["vae", 0], pixels=["picture", 0]),
    }
    graph["sampler"]["inputs"] |= {"positive": ["prompts", 0], "negative": ["prompts", 1]}
    return graph


@pytest.fixture(scope="module")
def original_video(comfyui: ComfyUI, request: pytest.FixtureRequest) -> Callable[[str], Tensor]:
    """Provide a function that returns a kind's video by diffusers' pipeline with CogVideoX's DDIM steps (its eta is 0).

    Only a model that takes a picture needs the VAE.
    """

    @functools.cache
    def make(kind: str) -> Tensor:
        beside: dict[str, Any] = {}
        if kind.endswith("i2v"):
            beside["vae"] = diffusers_encoder(kind, request.getfixturevalue("video_vae"))
            beside["image"] = Image.open(comfyui.input_dir / "first-frame.png")
        transformer = tiny_cogvideox.cogvideox(kind, max_text_seq_length=TEXT)
        scheduler = tiny_cogvideox.schedulers(kind)["cogvideox_ddim"]
        noise = draw(1, 16, FRAMES, HEIGHT, WIDTH, seed=SEED)
        prompts = [draw(1, TEXT, tiny_cogvideox.TEXT_WIDTH, seed=seed) for seed in PROMPTS.values()]
        return tiny_cogvideox.denoised_by_diffusers(transformer, scheduler, noise, prompts, STEPS, CFG, **beside)

    return make


def diffusers_encoder(kind: str, path: Path) -> AutoencoderKLCogVideoX:
    """Return a file's VAE by diffusers, with the settings published with a kind of model; only its encoder works."""
    with torch.device("meta"):
        vae = AutoencoderKLCogVideoX(
            block_out_channels=REAL,
            latent_channels=16,
            scaling_factor=SCALE[kind],
            invert_scale_latents=kind.startswith("1.5"),
        )
    vae.load_state_dict(load_file(path), assign=True)
    vae.encoder.float()
    return vae.eval().requires_grad_(False)


# tests/engine/test_cogvideox.py compares each kind with diffusers under all plans
@pytest.mark.parametrize("kind", [pytest.param(kind, marks=[thorough] * (kind != "2b")) for kind in SCALE])
def test_cogvideox_in_stock_nodes_equals_diffusers(
    latent_of: LatentOf, original_video: Callable[[str], Tensor], request: pytest.FixtureRequest, kind: str
) -> None:
    """CogVideoX's DDIM equals diffusers', and euler equals DDIM up to the first step's SNR."""
    expected = original_video(kind).double()
    make = (
        functools.partial(image_to_video, vae=request.getfixturevalue("video_vae").name)
        if kind.endswith("i2v")
        else video
    )
    for sampler in ("KSampler", "ParallelSampler"):
        graph = make(kind, node=sampler, sampler_name="cogvideox_ddim")
        assert relative_error(latent_of(graph) * SCALE[kind], expected) <= TOLERANCE
    if make is video:
        assert TOLERANCE < relative_error(latent_of(video(kind)) * SCALE[kind], expected) <= ZERO_SNR


def pixart_prompts() -> list[tuple[Tensor, Tensor]]:
    """Return the text and the mask of both branches; the texts differ in length."""
    return [
        (draw(1, tokens, tiny_pixart.TEXT_WIDTH, seed=tokens), (torch.arange(tokens) < shown)[None].float())
        for tokens, shown in ((9, 5), (4, 3))
    ]


def picture(**settings: Any) -> Graph:
    latent = node("EmptyLatentImage", width=80, height=64, batch_size=1)
    return family_graph("LoadParallelPixArt", "pixart", "picture", latent, **settings)


def test_pixart_with_masks_equals_diffusers(latent_of: LatentOf) -> None:
    scheduler = EulerDiscreteScheduler(
        beta_start=0.0001, beta_end=0.02, beta_schedule="linear", timestep_spacing="trailing"
    )
    # diffusers multiplies the table's thousand factors in fp32, ComfyUI in fp64: 1e-5 apart, so diffusers gets ComfyUI's
    scheduler.alphas_cumprod = (1 - torch.linspace(0.0001, 0.02, 1000, dtype=torch.float64)).cumprod(dim=0)
    (text, mask), (negative, negative_mask) = pixart_prompts()
    missing = text.shape[1] - negative.shape[1]  # diffusers accepts only one length: the mask hides the padding
    prompts = [(text, mask), (pad(negative, (0, 0, 0, missing)), pad(negative_mask, (0, missing)))]
    noise = draw(1, 4, 8, 10, seed=SEED) * (1 + scheduler.init_noise_sigma**-2) ** 0.5  # ComfyUI's noise has this size
    expected = tiny_pixart.denoised_by_diffusers(tiny_pixart.pixart(), scheduler, noise, prompts, STEPS, cfg=2.0)
    for sampler in ("KSampler", "ParallelSampler"):
        assert relative_error(latent_of(picture(node=sampler, cfg=2.0)) * 0.18215, expected.double()) <= TOLERANCE


def test_diffusers_folders_give_the_latent_of_one_file(comfyui: ComfyUI, latent_of: LatentOf) -> None:
    tiny_pixart.pixart().save_pretrained(models_of(comfyui) / "pixart-folder", max_shard_size="5MB")
    assert_folder(comfyui, latent_of, picture(), "pixart-folder")


@thorough  # tests/models/test_diffusers.py compares the blocks, compiled on several ranks, with diffusers
def test_torch_compile_compiles_the_workers_blocks(comfyui: ComfyUI, latent_of: LatentOf) -> None:
    """The blocks are of a GGUF file, with the values of another file."""
    models = models_of(comfyui)
    save_gguf(models / "pixart.safetensors", models / "pixart-q.gguf", models / "pixart-q.safetensors")
    expected = latent_of(choosing(picture(), "pixart-q.safetensors"))
    assert_compiled(comfyui, choosing(picture(), "pixart-q.gguf"), expected)


LORAS = {
    "cogvideox-1.5": (
        video("1.5"),
        ("blocks.0.norm1.linear", "blocks.1.q", "blocks.2.attn_out", "patch_embed.proj"),
        "",
    ),
    "pixart": (
        picture(),
        ("blocks.0.attn.qkv", "blocks.1.cross_attn.kv_linear", "blocks.2.mlp.fc2", "t_block.1"),
        PREFIX,
    ),
}
"""Files, and for each the graph, the layers that a LoRA changes, and the prefix of their names."""


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("name", ["cogvideox-1.5", pytest.param("pixart", marks=thorough)])
def test_a_lora_equals_a_file_with_the_lora_merged(
    comfyui: ComfyUI, latent_of: LatentOf, name: str, weights: str
) -> None:
    graph, layers, prefix = LORAS[name]
    assert_lora(comfyui, latent_of, graph, name, layers, weights, prefix)


@pytest.mark.parametrize("sampler", samplers("cogvideox_dpm", *SAMPLERS, "heun"))
def test_the_workers_loop_equals_one_model_call_at_a_time(comfyui: ComfyUI, latent_of: LatentOf, sampler: str) -> None:
    if sampler != "heun":  # from a sigma of 4518, heun multiplies the rounding of its second call by hundreds
        assert_loop(comfyui, latent_of, video("2b", sampler_name=sampler))
    if sampler != "cogvideox_dpm":  # cogvideox_dpm supports only whole denoises of CogVideoX
        assert_loop(comfyui, latent_of, video("1.5", sampler_name=sampler, denoise=0.6))
        assert_loop(comfyui, latent_of, picture(sampler_name=sampler))


def test_unsupported_inputs_are_refused_in_one_sentence(comfyui: ComfyUI) -> None:
    other = save_other_model(comfyui)
    assert refused(comfyui, choosing(video("2b"), other)) == (
        "flux-for-families.safetensors has no CogVideoX tensors: choose a CogVideoX 2b, 5b or 1.5-5B file."
    )
    assert refused(comfyui, choosing(picture(), other)).startswith(f"{other} has no PixArt tensors")
    assert refused(comfyui, video("1.5-i2v")).startswith(
        "this CogVideoX model turns an image into a video and was given no image: put InstructPixToPixConditioning"
    )
    assert (
        "has 3 frames (of 4 video frames each, the first of 1) and CogVideoX 1.5 computes them in pairs: use 4 (a "
        "length of 13" in refused(comfyui, video("1.5", length=9))
    )
    graph = video("2b")
    graph["positive"]["inputs"]["conditioning"] = "video-wide.safetensors"
    assert f"this model takes [batch, tokens, {tiny_cogvideox.TEXT_WIDTH}]" in refused(comfyui, graph)
    graph = video("2b")
    graph["latent"] = node("EmptyLatentImage", width=64, height=64, batch_size=1)
    comfyui.queue(graph, timeout=300).check()  # ComfyUI makes the latent a video of one frame
    latent = node("EmptyLatentImage", width=80, height=64, batch_size=1)
    given = {"node": "ParallelSampler", "sampler_name": "cogvideox_ddim"}
    graph = family_graph("LoadParallelFlux", other.removesuffix(".safetensors"), "video", latent, **given)
    graph["positive"]["inputs"]["conditioning"] = graph["negative"]["inputs"]["conditioning"] = "cond-37.safetensors"
    assert "The sampler 'cogvideox_ddim' is made for CogVideoX" in refused(comfyui, graph)
