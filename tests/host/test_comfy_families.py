"""ComfyUI's own models through Load Parallel Diffusion Model, against the stock loader in the same ComfyUI."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from scripts.comfyui import ComfyUI
from tests.host.conftest import relative_error, saved_latent
from tests.host.graphs import Graph, controlled, insert_after, insert_after_model, node, queue_logged, ways
from tests.host.test_families import refused
from tests.selection import thorough
from tests.tiny_comfy import TINY, save_tiny
from tests.tiny_controlnet import save_xlabs
from tests.tiny_flux import save_conditioning
from tests.tiny_models import draw

TOLERANCE = 1e-5
DIFFERENT = 1e-3
"""What is to matter changes the picture by more than this."""

TOKENS = {"positive": 7, "negative": 4}
FLUX1 = "tiny-schnell"

LATENTS = {
    FLUX1: node("EmptyLatentImage", width=72, height=104, batch_size=1),
    "flux2": node("EmptyFlux2LatentImage", width=112, height=80, batch_size=1),
    "wan": node("EmptyHunyuanLatentVideo", width=80, height=72, length=9, batch_size=1),
    "vace": node("EmptyHunyuanLatentVideo", width=80, height=64, length=9, batch_size=1),  # it takes no odd latent
    "wan_i2v": node("EmptyHunyuanLatentVideo", width=80, height=72, length=9, batch_size=1),
    "wan22_5b": node("LoadLatent", latent="wan22_5b.latent"),
}

LatentOf = Callable[[Graph], Tensor]


@pytest.fixture(scope="module", autouse=True)
def _files(comfyui: ComfyUI) -> None:
    save_families(comfyui, "flux2", "wan", "vace", "wan_i2v", "wan22_5b")
    for side, tokens in TOKENS.items():
        save_conditioning(comfyui.input_dir / f"{FLUX1}-{side}.safetensors", tokens)
    save_latent(comfyui, "reference", 1, 128, 3, 4)
    save_latent(comfyui, "reference-flux1", 1, 16, 7, 5)
    save_latent(comfyui, "wan22_5b", 1, *TINY["wan22_5b"].latent)
    save_latent(comfyui, "picture", 1, 128, 5, 7)


def save_families(server: ComfyUI, *names: str) -> None:
    """Write models and prompts for them."""
    for name in names:
        save_tiny(server.base_dir / "models" / "diffusion_models", name)
        for side, tokens in TOKENS.items():
            save_file(
                {"cond": draw(1, tokens, TINY[name].text, seed=tokens)}, server.input_dir / f"{name}-{side}.safetensors"
            )


def save_latent(server: ComfyUI, name: str, *shape: int) -> None:
    """Write a file for LoadLatent."""
    tensors = {"latent_tensor": draw(*shape, seed=len(name)), "latent_format_version_0": torch.tensor([])}
    save_file(tensors, server.input_dir / f"{name}.latent")


def graph_of(name: str, **settings: Any) -> Graph:
    """The stock loader and KSampler, saved by the node "save"."""
    sampler = {
        "sampler_name": "euler",
        "scheduler": "simple",
        "seed": 7,
        "steps": 3,
        "cfg": 2.5,
        "denoise": 1.0,
    } | settings
    return {
        "model": node("UNETLoader", unet_name=f"{name}.safetensors", weight_dtype="default"),
        **{side: node("LoadConditioning", conditioning=f"{name}-{side}.safetensors") for side in TOKENS},
        "latent": LATENTS[name],
        "sampler": node(
            "KSampler",
            model=["model", 0],
            positive=["positive", 0],
            negative=["negative", 0],
            latent_image=["latent", 0],
            **sampler,
        ),
        "save": node("SaveLatent", samples=["sampler", 0], filename_prefix="family"),
    }  # fmt: skip


def spread(graph: Graph, devices: str = "cpu:2", *, strict: bool = True, **plan: Any) -> Graph:
    """The same on workers, by Parallel Sampler unless a stock sampler is to show what it does."""
    plan = {"devices": devices, "cfg": 0, "ulysses": 0, "ring": 0, "attention": "auto"} | plan
    loader = node("LoadParallelDiffusionModel", **graph["model"]["inputs"], plan=["plan", 0])
    sampler = graph["sampler"]
    if strict:
        sampler = node("ParallelSampler", **sampler["inputs"])
    return graph | {"plan": node("ParallelPlan", **plan), "model": loader, "sampler": sampler}


@pytest.mark.parametrize("name", ["flux2", "wan", "vace", FLUX1])
def test_automatic_plan_gives_the_stock_result(name: str, latent_of: LatentOf) -> None:
    graph = graph_of(name)
    assert relative_error(latent_of(spread(graph)), latent_of(graph)) <= TOLERANCE


@pytest.mark.parametrize(
    ("name", "plan"),
    [
        ("flux2", {"devices": "cpu:4", "cfg": 2, "ulysses": 2}),
        ("flux2", {"devices": "cpu:4", "pipefusion": 2, "ulysses": 2, "warmup_steps": 99}),
        ("wan", {"devices": "cpu:3", "ring": 3}),
        ("wan", {"devices": "cpu:2", "weights": "sharded"}),
        ("vace", {"devices": "cpu:2", "pipefusion": 2, "warmup_steps": 99}),
        pytest.param(FLUX1, {"devices": "cpu:3", "ring": 3}, marks=thorough),
        pytest.param(FLUX1, {"devices": "cpu:2", "pipefusion": 2, "warmup_steps": 99}, marks=thorough),
        pytest.param(FLUX1, {"devices": "cpu:2", "weights": "sharded"}, marks=thorough),
    ],
)
def test_every_form_gives_the_stock_result(name: str, plan: dict[str, Any], latent_of: LatentOf) -> None:
    graph = graph_of(name)
    assert relative_error(latent_of(spread(graph, **plan)), latent_of(graph)) <= TOLERANCE


def with_reference(graph: Graph, file: str, side: str = "positive") -> Graph:
    """With one more reference latent on a side."""
    name = f"{side} with {file}"
    sampler = node(graph["sampler"]["class_type"], **graph["sampler"]["inputs"] | {side: [name, 0]})
    return graph | {
        f"latent {file}": node("LoadLatent", latent=f"{file}.latent"),
        name: node("ReferenceLatent", conditioning=graph["sampler"]["inputs"][side], latent=[f"latent {file}", 0]),
        "sampler": sampler,
    }


def step_by_step(graph: Graph) -> Graph:
    """With a sampler that the workers' loop does not carry."""
    return graph | {"sampler": node("KSampler", **graph["sampler"]["inputs"] | {"sampler_name": "dpm_fast"})}


@pytest.mark.parametrize(("name", "file"), [("flux2", "reference"), (FLUX1, "reference-flux1")])
def test_references(name: str, file: str, latent_of: LatentOf) -> None:
    """FLUX.2 and FLUX.1 Kontext with a reference picture, in the loop and with one forward a call."""
    graph = with_reference(graph_of(name, cfg=1.0), file)
    stock = latent_of(graph)
    assert relative_error(latent_of(graph_of(name, cfg=1.0)), stock) > DIFFERENT
    assert relative_error(latent_of(spread(graph)), stock) <= TOLERANCE
    stepwise = step_by_step(graph)
    assert relative_error(latent_of(spread(stepwise, strict=False)), latent_of(stepwise)) <= TOLERANCE


def test_controlnet_is_refused(comfyui: ComfyUI) -> None:
    save_xlabs(comfyui.base_dir / "models" / "controlnet" / "tiny-families.safetensors")
    graph = graph_of(FLUX1) | {
        "net": node("ControlNetLoader", control_net_name="tiny-families.safetensors"),
        "image": node("EmptyImage", width=80, height=48, batch_size=1, color=0x4080C0),
        "latent": node("EmptyLatentImage", width=80, height=48, batch_size=1),
    }
    assert refused(comfyui, spread(controlled(graph), strict=False)) == (
        "ControlNet cannot be used with a parallel FluxSchnell MODEL yet: remove it, or use Load Parallel FLUX for FLUX.1 "
        "and Load Diffusion Model for other models."
    )


# -- masks, image to video, image to image


def with_tensors(server: ComfyUI, graph: Graph, name: str, tensors: Mapping[str, Tensor]) -> Graph:
    """With these on both prompts, as nodes put them there that need a VAE or a vision model."""
    save_file(dict(tensors), server.input_dir / f"{name}-given.safetensors")
    for side in TOKENS:
        graph = insert_after(graph, side, "PackPrompt", "conditioning", file=f"{name}-given.safetensors")
    return graph


def masked(graph: Graph, width: int, height: int, frames: int) -> Graph:
    """With a mask on the latent that keeps its first frame; both are given in latent pixels."""
    size = {"width": width, "height": height}
    graph = insert_after(graph, "latent", "SetLatentNoiseMask", "samples", mask=["mask", 0])
    return graph | {
        "first": node("EmptyImage", **size, batch_size=1, color=0),
        "others": node("EmptyImage", **size, batch_size=frames - 1, color=0xFFFFFF),
        "frames": node("ImageBatch", image1=["first", 0], image2=["others", 0]),
        "mask": node("ImageToMask", image=["frames", 0], channel="red"),
    }


VIDEO_PLANS: list[dict[str, Any]] = [
    {"devices": "cpu:2"},
    {"devices": "cpu:2", "pipefusion": 2, "warmup_steps": 99},
    {"devices": "cpu:2", "ring": 2, "weights": "sharded"},
]
SOME = [VIDEO_PLANS[0], *(pytest.param(plan, marks=thorough) for plan in VIDEO_PLANS[1:])]


@pytest.mark.parametrize("plan", [VIDEO_PLANS[1], *(pytest.param(VIDEO_PLANS[i], marks=thorough) for i in (0, 2))])
def test_first_frame_by_a_mask(plan: dict[str, Any], latent_of: LatentOf) -> None:
    """Wan 2.2 5B: each frame has a timestep of its own."""
    graph = masked(graph_of("wan22_5b"), 10, 8, 3)
    stock = latent_of(graph)
    assert relative_error(latent_of(graph_of("wan22_5b")), stock) > DIFFERENT
    assert relative_error(latent_of(spread(graph, **plan)), stock) <= TOLERANCE


@thorough
def test_first_frame_by_a_mask_one_forward_at_a_time(latent_of: LatentOf) -> None:
    graph = step_by_step(masked(graph_of("wan22_5b"), 10, 8, 3))
    assert relative_error(latent_of(spread(graph, strict=False)), latent_of(graph)) <= TOLERANCE


@pytest.mark.parametrize("plan", SOME)
def test_image_to_video(comfyui: ComfyUI, plan: dict[str, Any], latent_of: LatentOf) -> None:
    """Wan 2.1 I2V: the first frame beside the latent, and what a vision model says of it beside the text."""
    shown = torch.ones(1, 1, 3, 9, 10)
    shown[:, :, 0] = 0
    given = {
        "clip_vision_output": draw(1, 5, 1280, seed=21),
        "concat_latent_image": draw(1, 16, 3, 9, 10, seed=22),
        "concat_mask": shown,
    }
    plain = graph_of("wan_i2v")
    graph = with_tensors(comfyui, plain, "i2v", given)
    stock = latent_of(graph)
    assert relative_error(latent_of(plain), stock) > DIFFERENT
    assert relative_error(latent_of(spread(graph, **plan)), stock) <= TOLERANCE


@pytest.mark.parametrize("plan", [VIDEO_PLANS[2], *(pytest.param(plan, marks=thorough) for plan in VIDEO_PLANS[:2])])
def test_control_videos(comfyui: ComfyUI, plan: dict[str, Any], latent_of: LatentOf) -> None:
    """VACE with two, of different strength."""
    given = {
        "vace_frames": draw(2, 1, 32, 3, 8, 10, seed=31),
        "vace_mask": (draw(2, 1, 64, 3, 8, 10, seed=32) > 0).float(),
        "vace_strength": torch.tensor([0.7, 1.5]),
    }
    graph = with_tensors(comfyui, graph_of("vace"), "vace", given)
    stock = latent_of(graph)
    assert relative_error(latent_of(graph_of("vace")), stock) > DIFFERENT
    assert relative_error(latent_of(spread(graph, **plan)), stock) <= TOLERANCE


@pytest.mark.parametrize("plan", SOME)
def test_image_to_image(plan: dict[str, Any], latent_of: LatentOf) -> None:
    graph = graph_of("flux2", denoise=0.5) | {"latent": node("LoadLatent", latent="picture.latent")}
    assert relative_error(latent_of(spread(graph, **plan)), latent_of(graph)) <= TOLERANCE


# -- PipeFusion


STALE_CASES: Mapping[str, Callable[[], Graph]] = {
    "reference": lambda: with_reference(graph_of("flux2", steps=4), "reference"),
    "rows": lambda: graph_of("wan", steps=4),
    "frames": lambda: (
        graph_of("wan", steps=4)
        | {"latent": node("EmptyHunyuanLatentVideo", width=64, height=48, length=21, batch_size=1)}
    ),
}


@pytest.mark.parametrize("case", ["reference", "rows", pytest.param("frames", marks=thorough)])
def test_stale_patches_depend_on_patches_and_warmup_alone(case: str, latent_of: LatentOf) -> None:
    graph = STALE_CASES[case]()
    patches = {"patches": 2, "warmup_steps": 1}
    one = latent_of(spread(graph, "cpu:1", pipefusion=1, **patches))
    two = latent_of(spread(graph, "cpu:2", pipefusion=2, **patches))
    four = latent_of(spread(graph, "cpu:4", pipefusion=2, ulysses=2, **patches))
    assert relative_error(two, one) <= TOLERANCE
    assert relative_error(four, one) <= TOLERANCE
    assert relative_error(one, latent_of(graph)) > TOLERANCE, "nothing was stale"


# -- two experts


EXPERTS = {"high": 77, "low": 78}


def two_experts(seed: int) -> Graph:
    """As Wan 2.2's template: the second model goes on where the first one stops."""
    graph = graph_of("wan", seed=seed)
    for name in EXPERTS:
        graph[f"{name} model"] = node("UNETLoader", unet_name=f"expert-{name}.safetensors", weight_dtype="default")
    sides = {side: [side, 0] for side in TOKENS}
    common = {"noise_seed": seed, "steps": 4, "cfg": 2.5, "sampler_name": "euler", "scheduler": "simple", **sides}
    high = {"add_noise": "enable", "start_at_step": 0, "end_at_step": 2, "return_with_leftover_noise": "enable"}
    low = {"add_noise": "disable", "start_at_step": 2, "end_at_step": 99, "return_with_leftover_noise": "disable"}
    graph["high"] = node("KSamplerAdvanced", model=["high model", 0], latent_image=["latent", 0], **common, **high)
    graph["sampler"] = node("KSamplerAdvanced", model=["low model", 0], latent_image=["high", 0], **common, **low)
    return graph


LOADED = re.compile(r"Parallel: the workers loaded (\d+) MiB")
MOVED = re.compile(r"expert-\w+\.safetensors(?: released|: \S+ MiB restored)")
MEBIBYTE = 1 << 20


def test_two_experts_are_read_once(comfyui: ComfyUI, latent_of: LatentOf, tmp_path: Path) -> None:
    """Both stay with the workers, in the first prompt and in the next one."""
    sizes = []
    for name, seed in EXPERTS.items():
        path = comfyui.base_dir / "models" / "diffusion_models" / f"expert-{name}.safetensors"
        save_tiny(tmp_path, "wan", seed=seed).rename(path)
        sizes.append(path.stat().st_size / MEBIBYTE)
    stock = {seed: latent_of(two_experts(seed)) for seed in (41, 42)}
    for seed, expected in ((41, sizes), (42, [])):
        graph = spread(two_experts(seed), strict=False)
        for name in EXPERTS:
            loader = graph[f"{name} model"]
            graph[f"{name} model"] = node("LoadParallelDiffusionModel", **loader["inputs"], plan=["plan", 0])
        run, log = queue_logged(comfyui, graph)
        assert relative_error(saved_latent(comfyui, run.check()), stock[seed]) <= TOLERANCE
        assert ways(log) == ["loop", "loop"]
        assert [int(size) for size in LOADED.findall(log)] == pytest.approx(expected, abs=1)
        assert MOVED.findall(log) == []


def test_stock_nodes(latent_of: LatentOf) -> None:
    """A shift of the schedule and a batch."""
    graph = insert_after_model(graph_of("wan"), "ModelSamplingSD3", shift=8.0)
    graph["latent"] = node("EmptyHunyuanLatentVideo", width=80, height=72, length=5, batch_size=2)
    assert relative_error(latent_of(spread(graph)), latent_of(graph)) <= TOLERANCE


def test_a_model_without_a_declaration_is_refused_by_name(comfyui: ComfyUI) -> None:
    save_tiny(comfyui.base_dir / "models" / "diffusion_models", "scail")
    graph = graph_of("wan")
    graph["model"]["inputs"]["unet_name"] = "scail.safetensors"
    assert "is a WAN21_SCAIL model, which is not supported yet" in refused(comfyui, spread(graph))


def test_text_of_another_encoder_is_refused(comfyui: ComfyUI) -> None:
    graph = graph_of("wan")
    graph["positive"]["inputs"]["conditioning"] = "flux2-positive.safetensors"
    assert "takes [batch, tokens, 4096]" in refused(comfyui, spread(graph))


# -- what would change the model from within

PICTURE = {
    "vae": node("VAELoader", vae_name="taef1"),
    "image": node("EmptyImage", width=64, height=64, batch_size=1, color=0x4080C0),
    "objects": node("PackObjects"),
}
CONTROL_PATCH = {"model_patch": ["objects", 4], "vae": ["vae", 0], "image": ["image", 0], "strength": 1.0}

ROPE = {f"{what}_{axis}": 1.5 for what in ("scale", "shift") for axis in "xyt"}

FROM_WITHIN: Mapping[str, tuple[str, dict[str, Any], str]] = {
    "NAGuidance": (
        "wan",
        {"nag_scale": 5.0, "nag_alpha": 0.5, "nag_tau": 1.5},
        "attention and block patches (attn1_output_patch) cannot be applied to",
    ),
    "SkipLayerGuidanceDiT": (
        "wan",
        {
            "double_layers": "0",
            "single_layers": "",
            "scale": 3.0,
            "start_percent": 0.0,
            "end_percent": 1.0,
            "rescaling_scale": 0.0,
        },
        "replaced attention or blocks (dit) cannot be applied to",
    ),
    "FluxKVCache": ("flux2", {}, "Replacing diffusion_model.params.default_ref_method cannot be done with"),
    "QwenImageDiffsynthControlnet": (
        "flux2",
        CONTROL_PATCH,
        "attention and block patches (double_block) cannot be applied to",
    ),
    "ZImageFunControlnet": ("flux2", CONTROL_PATCH, "attention and block patches (double_block) cannot be applied to"),
    "ScaleROPE": ("wan", ROPE, "changed positions (ScaleROPE) cannot be applied to"),
}
"""The node, on which model, its inputs, and what the refusal begins with."""


@pytest.mark.parametrize("kind", FROM_WITHIN)
def test_what_changes_the_model_from_within_is_refused_by_name(comfyui: ComfyUI, kind: str) -> None:
    name, inputs, said = FROM_WITHIN[kind]
    graph = insert_after_model(graph_of(name) | PICTURE, kind, **inputs)
    assert refused(comfyui, spread(graph, strict=False)) == (
        f"{said} a parallel MODEL: the weights live in the workers; remove that node, or use Load Diffusion Model."
    )


def test_context_windows_are_computed_one_by_one(latent_of: LatentOf) -> None:
    """ComfyUI cuts the video, so each window is a call of its own."""
    graph = graph_of("wan") | {"latent": node("EmptyHunyuanLatentVideo", width=64, height=48, length=29, batch_size=1)}
    windowed = insert_after_model(
        graph,
        "WanContextWindowsManual",
        context_length=17,
        context_overlap=8,
        context_schedule="standard_uniform",
        context_stride=1,
        closed_loop=False,
        fuse_method="pyramid",
        freenoise=True,
        retain_first_frame=False,
        split_conds_to_windows=False,
    )
    stock = latent_of(windowed)
    assert relative_error(latent_of(graph), stock) > DIFFERENT
    assert relative_error(latent_of(spread(windowed, strict=False)), stock) <= TOLERANCE
