"""PixArt through a real ComfyUI: stock nodes on our MODELs, against diffusers' pipeline."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers import EulerDiscreteScheduler, PixArtAlphaPipeline
from safetensors.torch import save_file
from torch import Tensor

from scripts.comfyui import ComfyUI
from tests.support.graphs.comfyui import LatentOf
from tests.support.graphs.diffusers import SEED, STEPS, family_graph, refused, save_gguf
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
from tests.support.tiny import pixart as tiny_pixart
from tests.support.tiny.models import draw

PREFIX = "model.diffusion_model."


@pytest.fixture(scope="module", autouse=True)
def _files(comfyui: ComfyUI) -> None:
    tiny_pixart.save_pixart(models_of(comfyui) / "pixart.safetensors", prefix=PREFIX)
    for name, (text, mask) in zip(("picture-positive", "picture-negative"), pixart_prompts(), strict=True):
        save_file({"cond": text, "attention_mask": mask}, comfyui.input_dir / f"{name}.safetensors")


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
    pipeline = PixArtAlphaPipeline(None, None, None, tiny_pixart.pixart(), scheduler)
    pipeline.set_progress_bar_config(disable=True)
    (text, mask), (negative, negative_mask) = pixart_prompts()
    longest = text.shape[1]  # diffusers accepts only one length: the mask hides the padding
    pad = longest - negative.shape[1]
    expected = pipeline(
        negative_prompt=None,
        prompt_embeds=text,
        prompt_attention_mask=mask,
        negative_prompt_embeds=torch.nn.functional.pad(negative, (0, 0, 0, pad)),
        negative_prompt_attention_mask=torch.nn.functional.pad(negative_mask, (0, pad)),
        height=64,
        width=80,
        num_inference_steps=STEPS,
        guidance_scale=2.0,
        latents=draw(1, 4, 8, 10, seed=SEED)
        * (1 + scheduler.init_noise_sigma**-2) ** 0.5,  # ComfyUI's noise has this size
        output_type="latent",
        use_resolution_binning=False,
    ).images
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


LAYERS = ("blocks.0.attn.qkv", "blocks.1.cross_attn.kv_linear", "blocks.2.mlp.fc2", "t_block.1")


@thorough  # in the quick run test_cogvideox has a LoRA
@pytest.mark.parametrize("weights", WEIGHTS)
def test_a_lora_equals_a_file_with_the_lora_merged(comfyui: ComfyUI, latent_of: LatentOf, weights: str) -> None:
    assert_lora(comfyui, latent_of, picture(), "pixart", LAYERS, weights, PREFIX)


@pytest.mark.parametrize("sampler", samplers(*SAMPLERS, "heun"))
def test_the_workers_loop_equals_one_model_call_at_a_time(comfyui: ComfyUI, latent_of: LatentOf, sampler: str) -> None:
    assert_loop(comfyui, latent_of, picture(sampler_name=sampler))


def test_unsupported_inputs_are_refused_in_one_sentence(comfyui: ComfyUI) -> None:
    graph = choosing(picture(), save_other_model(comfyui))
    assert refused(comfyui, graph).startswith("flux-for-families.safetensors has no PixArt tensors")
