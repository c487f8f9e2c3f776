"""The pack's templates, queued unchanged with tiny files under their files' names, give the frames of the stock loader's run.

Stand-ins replace text encoders, and autoencoders for which ComfyUI assumes one size of gigabytes: those of Wan 2.2,
HunyuanVideo 1.5 and MiniMax-H3, and LTX-2's of sound. Chroma, Qwen-Image and Z-Image are not here, because ComfyUI assumes
their real width. test_templates has CogVideoX and PixArt; test_contents has the sprites.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import av
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from benchmarks.template_graphs import read
from scripts.comfyui import REPO, ComfyUI
from tests.support.comfy_oracle import comfy_on_path
from tests.support.graphs.comfyui import TOLERANCE
from tests.support.graphs.flux import Graph, node
from tests.support.graphs.loras import save_lora
from tests.support.graphs.vae import pixels, saved
from tests.support.latents import relative_error
from tests.support.page.template_widgets import widgets_of
from tests.support.selection import thorough
from tests.support.tiny.comfyui import TINY, save_tiny
from tests.support.tiny.controlnet import save_wan_vae
from tests.support.tiny.families.ltx import LTXAV23
from tests.support.tiny.flux import save_flux
from tests.support.tiny.models import randomise
from tests.vae.comfy_vaes import KINDS, OF_A_FILE, build, save_comfy_vae, save_image_vae

pytestmark = thorough

ENCODERS = ("CLIPLoader", "DualCLIPLoader", "LTXAVTextEncoderLoader")
LOADERS = ("LoadParallelDiffusionModel", "LoadParallelFlux", "LoadParallelCheckpoint")
SMALL = {"width": 64, "height": 64, "length": 9, "frames_number": 9, "megapixels": 0.01}
"""Values for inputs of these names, on the nodes of `Job.small`."""


@dataclass(frozen=True)
class Job:
    """A template: its tiny models by file, the width of its text, the nodes that set its size, and its stand-ins by VAE file."""

    models: Mapping[str, str]
    text: int
    small: tuple[str, ...]
    vaes: Mapping[str, str] = field(default_factory=dict)


LTX = "ltx-2.3-22b-dev-fp8.safetensors"
SDXL = {"sd_xl_base_1.0.safetensors": "sdxl", "sd_xl_refiner_1.0.safetensors": "sdxl_refiner"}
WAN = ("EmptyHunyuanLatentVideo", "WanImageToVideo", "Wan22ImageToVideoLatent")
JOBS: Mapping[str, Job] = {
    "MiniMax-H3 text to video": Job(
        {"minimax_h3_fl2va_pruned_int8_convrot": "minimax_curves"},
        40,
        ("MiniMaxH3ImageToVideo",),
        {
            "minimax_h3_video_vae_fp16.safetensors": "MiniMax-H3",
            "minimax_h3_audio_vae_fp32.safetensors": "MiniMax-H3's sound",
        },
    ),
    "LTX-2.3 text to video": Job({}, 128 + 96, ("EmptyLTXVLatentVideo", "LTXVEmptyLatentAudio")),
    "HunyuanVideo 1.5 text to video": Job(
        {"hunyuanvideo1.5_720p_t2v_fp16": "hunyuan15"},
        48,
        ("EmptyHunyuanVideo15Latent",),
        {"hunyuanvideo15_vae_fp16.safetensors": "HunyuanVideo 1.5"},
    ),
    "Krea 2 Turbo": Job({"krea2_turbo_fp8_scaled": "krea2"}, 80, ("EmptyLatentImage",)),
    "Wan 2.2 14B text to video": Job(
        {"wan2.2_t2v_low_noise_14B_fp8_scaled": "wan", "wan2.2_t2v_high_noise_14B_fp8_scaled": "wan"}, 4096, WAN
    ),
    "Wan 2.2 14B image to video": Job(
        {"wan2.2_i2v_low_noise_14B_fp8_scaled": "wan_i2v", "wan2.2_i2v_high_noise_14B_fp8_scaled": "wan_i2v"}, 4096, WAN
    ),
    "Wan 2.2 5B text and image to video": Job(
        {"wan2.2_ti2v_5B_fp16": "wan22_5b"}, 4096, WAN, {"wan2.2_vae.safetensors": "Wan 2.2"}
    ),
    "FLUX.2 dev": Job({"flux2_dev_fp8mixed": "flux2"}, 48, ("EmptyFlux2LatentImage",)),
    "FLUX.2 dev image edit": Job(
        {"flux2_dev_fp8mixed": "flux2"}, 48, ("EmptyFlux2LatentImage", "ImageScaleToTotalPixels")
    ),
    "SDXL": Job({}, 2048, ("EmptyLatentImage",)),
    "SDXL with refiner": Job({}, 2048, ("EmptyLatentImage",)),
    "FLUX.1 dev": Job({"flux1-dev": "flux"}, 64, ("EmptySD3LatentImage",)),
    "FLUX.1 Krea dev in fp8 for 24 GB GPUs": Job({"flux1-krea-dev_fp8_scaled": "flux"}, 64, ("EmptySD3LatentImage",)),
}


@pytest.fixture(scope="module", autouse=True)
def _files(comfyui: ComfyUI) -> None:
    models = comfyui.base_dir / "models"
    folder = models / "diffusion_models"
    for job in JOBS.values():
        for number, (name, tiny) in enumerate(job.models.items()):
            if tiny == "flux":
                save_flux(folder / f"{name}.safetensors", guidance=True, seed=number)
            else:
                save_tiny(folder, tiny, seed=number).rename(folder / f"{name}.safetensors")
    save_wan_vae(models / "vae" / "wan_2.1_vae.safetensors")
    save_wan_vae(models / "vae" / "qwen_image_vae.safetensors")
    save_image_vae(models / "vae" / "ae.safetensors")
    save_comfy_vae(models / "vae" / "full_encoder_small_decoder.safetensors", "flux2", **OF_A_FILE, decoder_ch=32)
    _save_ltx(models)
    _save_sdxl(models)
    Image.new("RGB", (80, 64), (200, 80, 40)).save(comfyui.input_dir / "example.png")


def _save_ltx(models: Path) -> None:
    """Save a full checkpoint of LTX-2.3, its distilled LoRA and its upscaler."""
    tensors = load_file(save_tiny(models, "ltxav23"))
    layers = ("transformer_blocks.0.attn1.to_q", "transformer_blocks.1.video_to_audio_attn.to_v", "proj_out")
    distilled = "ltx_2.3_22b_distilled_1.1_lora_dynamic_fro09_avg_rank_111_bf16.safetensors"
    save_lora(models / "loras" / distilled, tuple(f"diffusion_model.{layer}" for layer in layers), tensors)
    whole = {f"model.diffusion_model.{key}": tensor for key, tensor in tensors.items()}
    whole |= {f"vae.{key}": tensor.contiguous() for key, tensor in build("ltx2").state_dict().items()}
    config = {"transformer": LTXAV23, "vae": KINDS["ltx2"].settings}
    for name in ("checkpoints", "latent_upscale_models"):
        (models / name).mkdir(exist_ok=True)
    save_file(whole, models / "checkpoints" / LTX, {"config": json.dumps(config)})
    comfy_on_path()
    import comfy.ops
    from comfy.ldm.lightricks.latent_upsampler import LatentUpsampler

    sizes = {"in_channels": 128, "mid_channels": 32, "num_blocks_per_stage": 1, "dims": 3}
    upscaler = randomise(LatentUpsampler.from_config(sizes, operations=comfy.ops.disable_weight_init), seed=3)
    file = models / "latent_upscale_models" / "ltx-2.3-spatial-upscaler-x2-1.1.safetensors"
    save_file(upscaler.state_dict(), file, {"config": json.dumps(sizes)})


def _save_sdxl(models: Path) -> None:
    """Save checkpoints of SDXL and its refiner, with their VAE and without text encoders."""
    (models / "checkpoints").mkdir(exist_ok=True)
    vae = load_file(save_image_vae(models / "vae" / "of-sdxl.safetensors", name="sd"))
    for file, tiny in SDXL.items():
        tensors = load_file(save_tiny(models, tiny))
        full = {f"model.diffusion_model.{key}": tensor for key, tensor in tensors.items()}
        full |= {f"first_stage_model.{key}": tensor for key, tensor in vae.items()}
        save_file(full, models / "checkpoints" / file)
        [(cond, options)] = TINY[tiny].prompt(7, seed=3)
        save_file({"cond": cond, **options}, models.parent / "input" / f"{tiny}-prompt.safetensors")


def queued(comfyui: ComfyUI, template: str) -> Graph:
    """Return a template as the page would queue it, small, on two workers and with stand-ins.

    The node "save" saves its frames exactly.
    """
    job, graph = JOBS[template], {"plan": node("ParallelPlan", devices="cpu:2")}
    for name, each in read(REPO / "workflows" / f"{template}.json").items():
        kind = each.kind
        if kind == "MarkdownNote":
            continue
        links = {slot: [source.node, source.index] for slot, source in each.links.items()}
        inputs: dict[str, Any] = dict(widgets_of(comfyui.object_info(kind)["input"], iter(each.widgets))) | links
        if kind in job.small:
            inputs |= {key: value for key, value in SMALL.items() if key in inputs}
        if kind in ENCODERS:
            kind, inputs = "PackClip", {"width": job.text, "unprocessed": template.startswith("LTX")}
        elif kind == "LTXVAudioVAELoader":
            kind, inputs = "PackVae", {"kind": "LTX-2's sound"}
        elif kind == "VAELoader" and inputs["vae_name"] in job.vaes:
            kind, inputs = "PackVae", {"kind": job.vaes[inputs["vae_name"]]}
        elif kind in LOADERS:
            inputs["plan"] = ["plan", 0]
        elif kind in ("LoraLoader", "LoraLoaderModelOnly"):
            lora = comfyui.base_dir / "models" / "loras" / inputs["lora_name"]
            if not lora.exists():  # that of a text encoder, or one after a switch that is off: without effect
                save_file({"unused": torch.zeros(1)}, lora)
        elif kind in ("CreateVideo", "SaveImage"):
            graph["save"] = saved(inputs["images"])
        if kind != "ParallelPlan":
            graph[name] = node(kind, **inputs)
    for name, each in list(graph.items()):
        if template.startswith("SDXL") and each["class_type"] == "CLIPTextEncode":
            checkpoint = graph[each["inputs"]["clip"][0]]["inputs"]["ckpt_name"]
            graph[name] = node("LoadConditioning", conditioning=f"{SDXL[checkpoint]}-prompt.safetensors")
    return graph


def stock(graph: Graph) -> Graph:
    """Return the graph with ComfyUI's own loaders."""
    graph = copy.deepcopy(graph)
    for name, each in graph.items():
        if each["class_type"] == "LoadParallelCheckpoint":
            graph[name] = node("CheckpointLoaderSimple", ckpt_name=each["inputs"]["ckpt_name"])
        elif each["class_type"] in LOADERS:
            file = each["inputs"]["unet_name"]
            graph[name] = node("UNETLoader", unet_name=file, weight_dtype="default")
            if file == f"checkpoints/{LTX}":
                graph[name] = node("CheckpointLoaderSimple", ckpt_name=LTX)
        elif each["class_type"] == "ParallelSampler":
            each["class_type"] = "KSampler"
    return graph


@pytest.mark.parametrize("template", JOBS)
def test_a_template_gives_the_stock_loaders_frames(comfyui: ComfyUI, template: str) -> None:
    graph = queued(comfyui, template)
    ours, expected = pixels(comfyui, graph), pixels(comfyui, stock(graph))
    assert ours.isfinite().all()
    assert expected.std() > 0.01
    assert relative_error(ours.double(), expected.double()) <= TOLERANCE


@pytest.mark.parametrize("template", ["MiniMax-H3 text to video", "LTX-2.3 text to video"])
def test_a_templates_video_has_frames_and_sound(comfyui: ComfyUI, template: str) -> None:
    graph = queued(comfyui, template)
    (name,) = [name for name, each in graph.items() if each["class_type"] == "SaveVideo"]
    (file,) = comfyui.files(comfyui.queue(graph, timeout=300).check(), name)
    with av.open(file) as video:
        assert len(list(video.decode(video=0))) > 1
    with av.open(file) as video:
        assert any(frame.to_ndarray().std() > 0 for frame in video.decode(audio=0))
