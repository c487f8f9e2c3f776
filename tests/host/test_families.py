"""CogVideoX and PixArt through a real ComfyUI: stock nodes on our MODELs, against diffusers' pipelines."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from diffusers import CogVideoXPipeline, EulerDiscreteScheduler, PixArtAlphaPipeline
from safetensors.torch import save_file
from torch import Tensor

from scripts.comfyui import ComfyUI
from tests import tiny_cogvideox, tiny_pixart
from tests.host.conftest import relative_error
from tests.host.graphs import Graph, node, queue_logged, ways
from tests.host.test_refusals import assert_one_sentence
from tests.tiny_flux import save_flux
from tests.tiny_models import draw

TOLERANCE = 1e-5
ZERO_SNR = 1e-3
"""What the first step differs by where pure noise is a sigma of 4518 and not infinity; measured 2e-4."""

SEED, STEPS, CFG = 7, 4, 6.0
FRAMES, HEIGHT, WIDTH, TEXT = 4, 6, 10, 7
SCALE = {"2b": 1.15258426, "5b": 0.7, "1.5": 0.7}

LatentOf = Callable[[Graph], Tensor]


@pytest.fixture(scope="module", autouse=True)
def _files(comfyui: ComfyUI) -> None:
    models = comfyui.base_dir / "models" / "diffusion_models"
    for kind in ("2b", "5b", "1.5", "5b-i2v"):
        tiny_cogvideox.save_cogvideox(models / f"cogvideox-{kind}.safetensors", kind)
    tiny_pixart.save_pixart(models / "pixart.safetensors", prefix="model.diffusion_model.")
    save_flux(models / "flux-for-families.safetensors", single_blocks=1)
    for name, seed in (("video-positive", 2), ("video-negative", 4)):
        save_file(
            {"cond": draw(1, TEXT, tiny_cogvideox.TEXT_WIDTH, seed=seed)}, comfyui.input_dir / f"{name}.safetensors"
        )
    save_file({"cond": draw(1, TEXT, 33, seed=1)}, comfyui.input_dir / "video-wide.safetensors")
    for name, (text, mask) in zip(("picture-positive", "picture-negative"), pixart_prompts(), strict=True):
        save_file({"cond": text, "attention_mask": mask}, comfyui.input_dir / f"{name}.safetensors")


def pixart_prompts() -> list[tuple[Tensor, Tensor]]:
    """Text and mask of both sides, the texts of different length."""
    return [
        (draw(1, tokens, tiny_pixart.TEXT_WIDTH, seed=tokens), (torch.arange(tokens) < shown)[None].float())
        for tokens, shown in ((9, 5), (4, 3))
    ]


def family_graph(loader: str, model: str, prompts: str, latent: dict[str, Any], **settings: Any) -> Graph:
    """A family's loader on two workers and KSampler, saved by the node "save"."""
    sampler = {"sampler_name": "euler", "scheduler": "simple", "seed": SEED, "steps": STEPS, "cfg": CFG, "denoise": 1.0}
    return {
        "plan": node("ParallelPlan", devices="cpu:2", cfg=0, ulysses=0, ring=0, attention="auto"),
        "model": node(loader, unet_name=f"{model}.safetensors", weight_dtype="default", plan=["plan", 0]),
        "positive": node("LoadConditioning", conditioning=f"{prompts}-positive.safetensors"),
        "negative": node("LoadConditioning", conditioning=f"{prompts}-negative.safetensors"),
        "latent": latent,
        "sampler": node(
            settings.pop("node", "KSampler"),
            model=["model", 0],
            positive=["positive", 0],
            negative=["negative", 0],
            latent_image=["latent", 0],
            **(sampler | settings),
        ),
        "save": node("SaveLatent", samples=["sampler", 0], filename_prefix="families"),
    }


def video(kind: str, *, length: int = 4 * FRAMES - 3, **settings: Any) -> Graph:
    size = {"width": 16 * (WIDTH // 2), "height": 16 * (HEIGHT // 2), "length": length, "batch_size": 1}
    latent = node("EmptyHunyuanLatentVideo", **size)
    return family_graph("LoadParallelCogVideoX", f"cogvideox-{kind}", "video", latent, **settings)


def picture(**settings: Any) -> Graph:
    latent = node("EmptyLatentImage", width=80, height=64, batch_size=1)
    return family_graph("LoadParallelPixArt", "pixart", "picture", latent, **settings)


def noise(*shape: int) -> Tensor:
    """ComfyUI's noise of the seed."""
    return draw(*shape, seed=SEED)


@pytest.fixture(scope="module")
def original_video() -> Callable[[str], Tensor]:
    """A type's video by diffusers' pipeline and CogVideoX's DDIM steps (its eta is 0)."""
    done: dict[str, Tensor] = {}

    def make(kind: str) -> Tensor:
        if kind not in done:
            transformer = tiny_cogvideox.cogvideox(kind, max_text_seq_length=TEXT)
            scheduler = tiny_cogvideox.schedulers(kind)["cogvideox_ddim"]
            pipeline = CogVideoXPipeline(None, None, None, transformer, scheduler)
            pipeline.set_progress_bar_config(disable=True)
            done[kind] = pipeline(
                prompt_embeds=draw(1, TEXT, tiny_cogvideox.TEXT_WIDTH, seed=2),
                negative_prompt_embeds=draw(1, TEXT, tiny_cogvideox.TEXT_WIDTH, seed=4),
                height=8 * HEIGHT,
                width=8 * WIDTH,
                num_frames=4 * FRAMES - 3,
                num_inference_steps=STEPS,
                guidance_scale=CFG,
                latents=noise(1, 16, FRAMES, HEIGHT, WIDTH).transpose(1, 2),
                output_type="latent",
            ).frames.transpose(1, 2)
        return done[kind]

    return make


@pytest.mark.parametrize("kind", ["2b", "5b", "1.5"])
def test_cogvideox_ddim_in_stock_nodes_equals_diffusers(
    latent_of: LatentOf, original_video: Callable[[str], Tensor], kind: str
) -> None:
    expected = original_video(kind).double()
    for sampler in ("KSampler", "ParallelSampler"):
        graph = video(kind, node=sampler, sampler_name="cogvideox_ddim")
        assert relative_error(latent_of(graph) * SCALE[kind], expected) <= TOLERANCE


@pytest.mark.parametrize("kind", ["2b", "5b", "1.5"])
def test_euler_is_ddim_up_to_the_first_steps_snr(
    latent_of: LatentOf, original_video: Callable[[str], Tensor], kind: str
) -> None:
    error = relative_error(latent_of(video(kind)) * SCALE[kind], original_video(kind).double())
    print(f"{kind}: euler is {error:.1e} from diffusers' DDIM")
    assert TOLERANCE < error <= ZERO_SNR


def test_the_loop_equals_one_forward_a_call(comfyui: ComfyUI, latent_of: LatentOf) -> None:
    for graph in (video("2b", sampler_name="cogvideox_dpm"), picture(sampler_name="euler_ancestral")):
        stepped = graph | {
            "cache": node(
                "EasyCache", model=["model", 0], reuse_threshold=0.0, start_percent=1.0, end_percent=1.0, verbose=False
            )
        }
        stepped["sampler"] = node("KSampler", **(graph["sampler"]["inputs"] | {"model": ["cache", 0]}))
        run, log = queue_logged(comfyui, stepped)
        run.check()
        assert ways(log) != ["loop"]
        assert relative_error(latent_of(stepped), latent_of(graph)) <= TOLERANCE


def test_pixart_with_masks_equals_diffusers(latent_of: LatentOf) -> None:
    scheduler = EulerDiscreteScheduler(
        beta_start=0.0001, beta_end=0.02, beta_schedule="linear", timestep_spacing="trailing"
    )
    # diffusers multiplies the table's thousand factors in fp32, ComfyUI in fp64: 1e-5 apart, so it is given the latter
    scheduler.alphas_cumprod = (1 - torch.linspace(0.0001, 0.02, 1000, dtype=torch.float64)).cumprod(dim=0)
    pipeline = PixArtAlphaPipeline(None, None, None, tiny_pixart.pixart(), scheduler)
    pipeline.set_progress_bar_config(disable=True)
    (text, mask), (negative, negative_mask) = pixart_prompts()
    longest = text.shape[1]  # diffusers takes one length: the rest is hidden by the mask
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
        latents=noise(1, 4, 8, 10) * (1 + scheduler.init_noise_sigma**-2) ** 0.5,  # ComfyUI's noise has this size
        output_type="latent",
        use_resolution_binning=False,
    ).images
    for sampler in ("KSampler", "ParallelSampler"):
        assert relative_error(latent_of(picture(node=sampler, cfg=2.0)) * 0.18215, expected.double()) <= TOLERANCE


def refused(comfyui: ComfyUI, graph: Graph) -> str:
    run = comfyui.queue(graph, timeout=300)
    assert run.status == "error"
    assert run.error is not None
    assert_one_sentence(run.error.exception_message)
    return run.error.exception_message


def test_bad_input_is_refused_in_one_sentence(comfyui: ComfyUI) -> None:
    graph = video("2b")
    graph["model"]["inputs"]["unet_name"] = "flux-for-families.safetensors"
    assert refused(comfyui, graph) == (
        "flux-for-families.safetensors has no CogVideoX tensors: choose a CogVideoX 2b, 5b or 1.5-5B file."
    )
    graph = picture()
    graph["model"]["inputs"]["unet_name"] = "flux-for-families.safetensors"
    assert refused(comfyui, graph).startswith("flux-for-families.safetensors has no PixArt tensors")
    assert refused(comfyui, video("5b-i2v")).startswith(
        "this CogVideoX model turns an image into a video and was given none: put InstructPixToPixConditioning"
    )
    assert (
        "has 3 frames (of 4 video frames each, the first of 1) and CogVideoX 1.5 computes them by twos: use 4 (a length of 13"
        in refused(comfyui, video("1.5", length=9))
    )
    graph = video("2b")
    graph["positive"]["inputs"]["conditioning"] = "video-wide.safetensors"
    assert f"this model takes [batch, tokens, {tiny_cogvideox.TEXT_WIDTH}]" in refused(comfyui, graph)
    graph = video("2b")
    graph["latent"] = node("EmptyLatentImage", width=64, height=64, batch_size=1)
    comfyui.queue(graph, timeout=300).check()  # ComfyUI makes it a video of one frame
    graph = picture(node="ParallelSampler", sampler_name="cogvideox_ddim")
    graph["model"] = node(
        "LoadParallelFlux", unet_name="flux-for-families.safetensors", weight_dtype="default", plan=["plan", 0]
    )
    graph["positive"]["inputs"]["conditioning"] = graph["negative"]["inputs"]["conditioning"] = "cond-37.safetensors"
    assert "cogvideox_ddim, which is made for CogVideoX" in refused(comfyui, graph)
