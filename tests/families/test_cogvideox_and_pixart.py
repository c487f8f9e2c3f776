"""CogVideoX and PixArt through a real ComfyUI: stock nodes on our MODELs, against diffusers' pipelines."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import (
    AutoencoderKLCogVideoX,
    CogVideoXImageToVideoPipeline,
    CogVideoXPipeline,
    EulerDiscreteScheduler,
    PixArtAlphaPipeline,
)
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor

from scripts.comfyui import ComfyUI
from tests.support.graphs.diffusers import CFG, SEED, STEPS, family_graph, refused, save_gguf
from tests.support.graphs.flux import Graph, insert_after_model, node, queue_logged, ways
from tests.support.latents import relative_error, saved_latent
from tests.support.selection import thorough
from tests.support.tiny import cogvideox as tiny_cogvideox
from tests.support.tiny import pixart as tiny_pixart
from tests.support.tiny.flux import save_flux
from tests.support.tiny.models import draw
from tests.support.tiny.vae import REAL

TOLERANCE = 1e-5
ZERO_SNR = 1e-3
"""What the first step differs by where pure noise is a sigma of 4518 and not infinity; measured 2e-4."""

FRAMES, HEIGHT, WIDTH, TEXT = 4, 6, 10, 7
SCALE = {"2b": 1.15258426, "5b": 0.7, "1.5": 0.7, "5b-i2v": 0.7, "1.5-i2v": 0.7}
QUICK_KINDS = ("2b",)
"""Each kind against diffusers, on any plan: tests/engine/test_cogvideox.py."""

LatentOf = Callable[[Graph], Tensor]


@pytest.fixture(scope="module", autouse=True)
def _files(comfyui: ComfyUI) -> None:
    models = comfyui.base_dir / "models" / "diffusion_models"
    for kind in SCALE:
        tiny_cogvideox.save_cogvideox(models / f"cogvideox-{kind}.safetensors", kind)
    tiny_pixart.save_pixart(models / "pixart.safetensors", prefix="model.diffusion_model.")
    pixels = np.random.default_rng(9).integers(0, 256, (8 * HEIGHT, 8 * WIDTH, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(comfyui.input_dir / "first-frame.png")
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


def video(kind: str, *, length: int = 4 * FRAMES - 3, **settings: Any) -> Graph:
    size = {"width": 16 * (WIDTH // 2), "height": 16 * (HEIGHT // 2), "length": length, "batch_size": 1}
    latent = node("EmptyHunyuanLatentVideo", **size)
    return family_graph("LoadParallelCogVideoX", f"cogvideox-{kind}", "video", latent, **settings)


def image_to_video(kind: str, vae: str, **settings: Any) -> Graph:
    """`video`, from a picture by stock nodes; the VAE is a parallel one too."""
    graph = video(kind, **settings)
    prompts = {"positive": ["positive", 0], "negative": ["negative", 0]}
    graph |= {
        "vae": node("LoadParallelVAE", vae_name=vae, plan=["plan", 0]),
        "picture": node("LoadImage", image="first-frame.png"),
        "prompts": node("InstructPixToPixConditioning", **prompts, vae=["vae", 0], pixels=["picture", 0]),
    }
    graph["sampler"]["inputs"] |= {"positive": ["prompts", 0], "negative": ["prompts", 1]}
    return graph


def picture(**settings: Any) -> Graph:
    latent = node("EmptyLatentImage", width=80, height=64, batch_size=1)
    return family_graph("LoadParallelPixArt", "pixart", "picture", latent, **settings)


def noise(*shape: int) -> Tensor:
    """ComfyUI's noise of the seed."""
    return draw(*shape, seed=SEED)


@pytest.fixture(scope="module")
def original_video(comfyui: ComfyUI, video_vae: Path) -> Callable[[str], Tensor]:
    """A type's video by diffusers' pipeline and CogVideoX's DDIM steps (its eta is 0)."""
    done: dict[str, Tensor] = {}

    def make(kind: str) -> Tensor:
        if kind not in done:
            transformer = tiny_cogvideox.cogvideox(kind, max_text_seq_length=TEXT)
            scheduler = tiny_cogvideox.schedulers(kind)["cogvideox_ddim"]
            image: dict[str, Any] = {}
            if kind.endswith("i2v"):
                pipeline = CogVideoXImageToVideoPipeline(
                    None, None, diffusers_encoder(kind, video_vae), transformer, scheduler
                )
                image["image"] = Image.open(comfyui.input_dir / "first-frame.png")
            else:
                pipeline = CogVideoXPipeline(None, None, None, transformer, scheduler)
            pipeline.set_progress_bar_config(disable=True)
            done[kind] = pipeline(
                **image,
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


def diffusers_encoder(kind: str, path: Path) -> AutoencoderKLCogVideoX:
    """A file's VAE by diffusers, with the settings published with a type of model; only its encoder can be used."""
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


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=[thorough] * (kind not in QUICK_KINDS)) for kind in SCALE])
def test_cogvideox_ddim_in_stock_nodes_equals_diffusers(
    latent_of: LatentOf, original_video: Callable[[str], Tensor], video_vae: Path, kind: str
) -> None:
    expected = original_video(kind).double()
    make = partial(image_to_video, vae=video_vae.name) if kind.endswith("i2v") else video
    for sampler in ("KSampler", "ParallelSampler"):
        graph = make(kind, node=sampler, sampler_name="cogvideox_ddim")
        assert relative_error(latent_of(graph) * SCALE[kind], expected) <= TOLERANCE


@pytest.mark.parametrize("kind", ["2b", pytest.param("5b", marks=thorough), pytest.param("1.5", marks=thorough)])
def test_euler_is_ddim_up_to_the_first_steps_snr(
    latent_of: LatentOf, original_video: Callable[[str], Tensor], kind: str
) -> None:
    error = relative_error(latent_of(video(kind)) * SCALE[kind], original_video(kind).double())
    print(f"{kind}: euler is {error:.1e} from diffusers' DDIM")
    assert TOLERANCE < error <= ZERO_SNR


def test_diffusers_folders(comfyui: ComfyUI, latent_of: LatentOf) -> None:
    models = comfyui.base_dir / "models" / "diffusion_models"
    tiny_cogvideox.cogvideox("1.5").save_pretrained(models / "cogvideox-folder", max_shard_size="2MB")
    tiny_pixart.pixart().save_pretrained(models / "pixart-folder", max_shard_size="5MB")
    for graph, folder in ((video("1.5"), "cogvideox-folder"), (picture(), "pixart-folder")):
        assert len(list((models / folder).glob("*.safetensors"))) > 1
        assert relative_error(latent_of(choosing(graph, folder)), latent_of(graph)) <= TOLERANCE


def test_quantised_files(comfyui: ComfyUI, latent_of: LatentOf) -> None:
    """As the file with the same values in fp32."""
    models = comfyui.base_dir / "models" / "diffusion_models"
    for graph, name in ((video("1.5"), "cogvideox-1.5"), (picture(), "pixart")):
        save_gguf(models / f"{name}.safetensors", models / f"{name}.gguf", models / f"{name}-values.safetensors")
        expected = latent_of(choosing(graph, f"{name}-values.safetensors"))
        assert relative_error(latent_of(choosing(graph, f"{name}.gguf")), expected) <= TOLERANCE
        assert relative_error(expected, latent_of(graph)) > 1e-3


@thorough  # the blocks themselves, compiled over ranks, against diffusers: tests/models/test_diffusers.py
def test_torch_compile_compiles_the_workers_blocks(
    comfyui: ComfyUI, latent_of: LatentOf, original_video: Callable[[str], Tensor]
) -> None:
    """On CPUs cudagraphs is what is left of it without a recorder: the same graphs, run as they are."""
    models = comfyui.base_dir / "models" / "diffusion_models"
    save_gguf(models / "pixart.safetensors", models / "pixart-q.gguf", models / "pixart-q.safetensors")
    for graph, expected in (
        (video("2b", sampler_name="cogvideox_ddim"), original_video("2b").double() / SCALE["2b"]),
        (choosing(picture(), "pixart-q.gguf"), latent_of(choosing(picture(), "pixart-q.safetensors"))),
    ):
        graph["plan"]["inputs"]["devices"] = "cpu:1"
        run, log = queue_logged(comfyui, insert_after_model(graph, "TorchCompileModel", backend="cudagraphs"))
        assert relative_error(saved_latent(comfyui, run.check()), expected) <= TOLERANCE
        assert "blocks compiled by cudagraphs" in log
        assert "is not compiled" not in log


@pytest.mark.parametrize("weights", [pytest.param("replicated", marks=thorough), "sharded"])
def test_a_lora_equals_a_file_that_has_it_in(comfyui: ComfyUI, latent_of: LatentOf, weights: str) -> None:
    models = comfyui.base_dir / "models"
    for graph, name, layers in (
        (
            video("1.5"),
            "cogvideox-1.5",
            ("blocks.0.norm1.linear", "blocks.1.q", "blocks.2.attn_out", "patch_embed.proj"),
        ),
        (picture(), "pixart", ("blocks.0.attn.qkv", "blocks.1.cross_attn.kv_linear", "blocks.2.mlp.fc2", "t_block.1")),
    ):
        graph["plan"]["inputs"] |= {"ulysses": 2, "weights": weights}
        merged, lora = load_file(models / "diffusion_models" / f"{name}.safetensors"), {}
        prefix = "model.diffusion_model." if name == "pixart" else ""
        for number, layer in enumerate(layers):
            weight = merged[f"{prefix}{layer}.weight"]
            down, up = draw(4, weight.shape[1], seed=number) / 4, draw(weight.shape[0], 4, seed=9 + number) / 16
            lora |= {f"diffusion_model.{layer}.lora_A.weight": down, f"diffusion_model.{layer}.lora_B.weight": up}
            weight += 0.8 * up @ down
        save_file(lora, models / "loras" / f"{name}.safetensors")
        save_file(merged, models / "diffusion_models" / f"{name}-merged.safetensors")
        adapted = insert_after_model(graph, "LoraLoaderModelOnly", lora_name=f"{name}.safetensors", strength_model=0.8)
        expected = latent_of(choosing(graph, f"{name}-merged.safetensors"))
        assert relative_error(latent_of(adapted), expected) <= TOLERANCE
        assert relative_error(latent_of(graph), expected) > 1e-2


def choosing(graph: Graph, unet_name: str) -> Graph:
    """The graph with another file."""
    loader = graph["model"]["inputs"] | {"unet_name": unet_name}
    return graph | {"model": node(graph["model"]["class_type"], **loader)}


SAMPLERS = ("euler_ancestral", "dpmpp_2m", "dpmpp_2m_sde", "dpmpp_3m_sde", "ddim", "lcm", "deis", "res_multistep")


QUICK_SAMPLERS = ("cogvideox_dpm", "dpmpp_2m_sde", "heun")
"""Each sampler by itself: tests/denoise/test_samplers.py."""


@pytest.mark.parametrize(
    "sampler",
    [
        pytest.param(sampler, marks=[thorough] * (sampler not in QUICK_SAMPLERS))
        for sampler in ("cogvideox_dpm", *SAMPLERS, "heun")
    ],
)
def test_the_loop_equals_comfyuis_with_one_forward_a_call(comfyui: ComfyUI, latent_of: LatentOf, sampler: str) -> None:
    graphs = []
    if sampler != "heun":  # from a sigma of 4518 it multiplies the rounding of its second call by hundreds
        graphs.append(video("2b", sampler_name=sampler))
    if sampler != "cogvideox_dpm":  # which is for CogVideoX and whole denoises
        graphs += [video("1.5", sampler_name=sampler, denoise=0.6), picture(sampler_name=sampler)]
    for graph in graphs:
        stepped = graph | {
            "cache": node(  # where it is to tell of each call, calls run one at a time
                "EasyCache", model=["model", 0], reuse_threshold=0.0, start_percent=1.0, end_percent=1.0, verbose=True
            )
        }
        stepped["sampler"] = node("KSampler", **(graph["sampler"]["inputs"] | {"model": ["cache", 0]}))
        run, log = queue_logged(comfyui, stepped)
        run.check()
        assert ways(log) != ["loop"]
        expected = saved_latent(comfyui, run)
        assert relative_error(latent_of(graph), expected) <= TOLERANCE


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
    assert "The sampler 'cogvideox_ddim' is made for CogVideoX" in refused(comfyui, graph)
