"""Model files of all forms: a parallel denoise against ComfyUI's KSampler on the same file, or on the same values."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor

from scripts.comfyui import ComfyUI
from tests.support.graphs.flux import Graph, insert_after_model, ksampler_graph, node, parallel, step_by_step
from tests.support.latents import relative_error
from tests.support.selection import product, thorough
from tests.support.server import NARROW, NARROW_DEV
from tests.support.tiny.flux import save_flux
from tests.support.tiny.formats import save_diffusers, save_fp8, save_gguf, save_scaled, save_sparse

TOLERANCE = 1e-5
DIFFERENT = 1e-2
STEPS = 2

LatentOf = Callable[[Graph], Tensor]

PLANS: dict[str, dict[str, Any]] = {
    "ulysses": {"ulysses": 2},
    "stages": {"pipefusion": 2, "patches": 2, "warmup_steps": STEPS},
    "sharded": {"ulysses": 2, "weights": "sharded"},
}
FULL = ("full-bf16", "full-fp8", "full-scaled")
PLAIN: dict[str, Any] = {"heads": 2, "seed": 3}
"""Settings of NARROW's weights before their quantisation."""

GGUF_TYPES = (Type.Q8_0, Type.Q4_0, Type.Q5_K, Type.Q4_K, Type.Q6_K, Type.F16)


@pytest.fixture(scope="module", autouse=True)
def _files(comfyui: ComfyUI) -> None:
    models = comfyui.base_dir / "models"
    folder = models / "diffusion_models"
    save_fp8(folder / "e4m3fn.safetensors", torch.float8_e4m3fn, **PLAIN)
    save_fp8(folder / "e5m2.safetensors", torch.float8_e5m2, **PLAIN, guidance=True)
    save_scaled(folder / "scaled-old.safetensors", "old", **PLAIN)
    save_scaled(folder / "scaled-marks.safetensors", "marks", **PLAIN, guidance=True)
    save_scaled(folder / "scaled-metadata.safetensors", "metadata", torch.float8_e5m2, **PLAIN)
    for kind in GGUF_TYPES:
        save_gguf(folder / f"{kind.name}.gguf", folder / f"{kind.name}-values.safetensors", kind, **PLAIN)
    save_diffusers(folder / "diffusers-shards", folder / "diffusers-single.safetensors", shard="4MB", heads=2)
    (models / "diffusers").mkdir(exist_ok=True)
    save_diffusers(
        models / "diffusers" / "pipeline" / "transformer", folder / "pipeline.safetensors", shard="1GB", heads=2, seed=1
    )
    (models / "checkpoints").mkdir(exist_ok=True)
    other = {"vae.decoder.conv_in.weight": torch.ones(4, 4), "text_encoders.clip_l.logit_scale": torch.ones(())}
    inside = {"prefix": "model.diffusion_model.", "heads": 2, "single_blocks": 1, "seed": 4}
    save_flux(folder / "full-bf16.safetensors", dtype=torch.bfloat16, **inside)
    save_fp8(folder / "full-fp8.safetensors", torch.float8_e4m3fn, **inside)
    save_scaled(folder / "full-scaled.safetensors", "marks", **inside)
    for form in FULL:
        full = folder / f"{form}.safetensors"
        save_file(load_file(full) | other, models / "checkpoints" / full.name)
    save_flux(folder / "fill.safetensors", heads=2, channels=96, guidance=True, seed=5)
    save_flux(folder / "canny.safetensors", heads=2, channels=32, guidance=True, seed=6)
    generator = torch.Generator().manual_seed(7)
    for height, width in ((13, 9), (16, 24), (7, 5), (24, 8), (8, 8)):
        latent = {"latent_tensor": torch.randn(1, 16, height, width, generator=generator)}
        file = comfyui.input_dir / f"reference-{height}x{width}.latent"
        save_file(latent | {"latent_format_version_0": torch.tensor([])}, file)
    colours = np.random.default_rng(8).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    picture = Image.fromarray(colours).resize((72, 104), Image.Resampling.NEAREST)
    picture.save(comfyui.input_dir / "picture.png")


def small(model: str, **settings: Any) -> Graph:
    """Return a graph of 72x104 pixels, an odd latent of 9x13."""
    return ksampler_graph(model, width=72, height=104, **{"steps": STEPS, "cfg": 2.0} | settings)


def in_workers(graph: Graph, plan: str, choice: str | None = None, **settings: Any) -> Graph:
    """Return the graph on two workers, with another choice in the loader if one is given."""
    graph = parallel(graph, "cpu:2", sampler=True, **PLANS[plan] | settings)
    if choice is not None:
        graph["model"]["inputs"]["unet_name"] = choice
    return graph


@pytest.fixture
def error(latent_of: LatentOf) -> Callable[..., float]:
    """Provide a function that returns the relative L2 error of a graph on the workers."""

    def compute(graph: Graph, plan: str, choice: str | None = None, **settings: Any) -> float:
        return relative_error(latent_of(in_workers(graph, plan, choice, **settings)), latent_of(graph))

    return compute


@pytest.mark.parametrize(
    ("model", "plan"),
    [
        pytest.param("e4m3fn", "ulysses", marks=thorough),
        ("e4m3fn", "sharded"),
        ("e5m2", "stages"),
        ("scaled-old", "ulysses"),
        pytest.param("scaled-old", "sharded", marks=thorough),
        ("scaled-marks", "stages"),
        ("scaled-metadata", "ulysses"),
    ],
)
def test_fp8_files_give_the_stock_latent(error, model, plan):
    assert error(small(model), plan) <= TOLERANCE


@pytest.mark.parametrize(
    ("kind", "plan"),
    [
        (Type.Q4_K, "ulysses"),
        # tests/weights/test_formats.py tests every type bit for bit
        *(pytest.param(kind, "ulysses", marks=thorough) for kind in GGUF_TYPES if kind != Type.Q4_K),
        (Type.Q4_K, "sharded"),
        (Type.Q8_0, "sharded"),
        (Type.Q6_K, "stages"),
    ],
)
def test_gguf_files_give_the_stock_latent_of_their_values(error, kind, plan):
    """ComfyUI runs the values that the gguf package itself expands."""
    assert error(small(f"{kind.name}-values"), plan, f"{kind.name}.gguf") <= TOLERANCE


@product(
    file=[("e4m3fn", None), ("scaled-old", None), ("scaled-metadata", None), ("Q8_0-values", "Q8_0.gguf")],
    dtype={"fp32": None, "bf16": "bf16"},
)
def test_quantised_files_lose_no_more_precision_than_in_comfyui(latent_of, file, dtype):
    """The error is relative to the latent of the weights before their quantisation."""
    model, choice = file
    exact = latent_of(small(NARROW))
    graph = small(model)
    if dtype is not None:
        graph = insert_after_model(graph, "ModelComputeDtype", dtype=dtype)
    ours, comfys = (relative_error(latent_of(g), exact) for g in (in_workers(graph, "ulysses", choice), graph))
    print(f"{model} {dtype}: {ours:.6f}, ComfyUI {comfys:.6f}")
    assert comfys > TOLERANCE
    assert ours <= (comfys + TOLERANCE if dtype is None else 1.5 * comfys)


@pytest.mark.parametrize("plan", [pytest.param("ulysses", marks=thorough), "sharded"])
def test_a_diffusers_folder_of_shards_gives_the_stock_latent(error, plan):
    assert error(small("diffusers-single"), plan, "diffusers-shards") <= TOLERANCE


def test_a_pipeline_folder_and_a_file_with_diffusers_names_give_the_stock_latent(error):
    assert error(small("pipeline"), "ulysses", "diffusers/pipeline") <= TOLERANCE
    assert error(small("pipeline"), "stages") <= TOLERANCE


@pytest.mark.parametrize(("form", "plan"), list(zip(FULL, PLANS, strict=True)))
def test_full_checkpoints_give_the_stock_latent(error, form, plan):
    assert error(small(form), plan, f"checkpoints/{form}.safetensors") <= TOLERANCE


@pytest.mark.parametrize("weight_dtype", [pytest.param("fp8_e4m3fn", marks=thorough), "fp8_e4m3fn_fast", "fp8_e5m2"])
def test_weight_dtypes_of_load_diffusion_model_give_the_stock_latent(error, weight_dtype):
    graph = small(NARROW_DEV)
    graph["model"]["inputs"]["weight_dtype"] = weight_dtype
    assert error(graph, "sharded") <= TOLERANCE


def test_the_loader_offers_every_form_of_file(comfyui: ComfyUI):
    choices = comfyui.object_info("LoadParallelFlux")["input"]["required"]["unet_name"]
    offered = choices[1]["options"] if choices[0] == "COMBO" else choices[0]
    expected = (
        "e4m3fn.safetensors",
        "Q4_K.gguf",
        "diffusers-shards",
        "diffusers/pipeline",
        "checkpoints/full-fp8.safetensors",
    )
    assert set(expected) <= set(offered)


# -- while loading


def test_the_node_shows_loading_and_can_cancel_it(comfyui: ComfyUI, latent_of: LatentOf):
    plan = {"pipefusion": 1, "ulysses": 2}
    before = small(NARROW_DEV, seed=31)
    assert relative_error(latent_of(in_workers(before, "ulysses", **plan)), latent_of(before)) <= TOLERANCE
    save_sparse(comfyui.base_dir / "models" / "diffusion_models" / "large.safetensors", heads=32)
    graph = in_workers(small("large"), "ulysses", **plan)
    graph["model"]["inputs"]["weight_dtype"] = "fp8_e4m3fn"
    log = len(comfyui.log)
    run = comfyui.queue(
        graph, on_text=lambda told: told.text.startswith("Loading") and comfyui.interrupt(), timeout=300
    )
    assert run.status == "interrupted"
    first = next(told.text for told in run.texts if told.text.startswith("Loading"))
    assert re.fullmatch(r"Loading [01]\.\d of 2\.\d GB", first)
    assert not run.progress, "the bar is for steps alone"
    assert run.texts[-1].text == "Cancelled"
    after = small(NARROW_DEV, seed=32)
    assert relative_error(latent_of(in_workers(after, "ulysses", **plan)), latent_of(after)) <= TOLERANCE
    assert "Parallel: starting" not in comfyui.log[log:], "the same workers"


# -- Kontext, Fill, Canny


def referring(graph: Graph, sizes: list[tuple[int, int]], method: str | None = None, side: str = "positive") -> Graph:
    """Add reference latents after a prompt. A size is that of the latent, height first."""
    graph = copy.deepcopy(graph)
    source = [side, 0]
    for number, (height, width) in enumerate(sizes):
        name, latent = f"{side} reference {number}", f"{side} latent {number}"
        graph[latent] = node("LoadLatent", latent=f"reference-{height}x{width}.latent")
        graph[name] = node("ReferenceLatent", conditioning=source, latent=[latent, 0])
        source = [name, 0]
    if method is not None:
        graph["method"] = node(
            "FluxKontextMultiReferenceLatentMethod", conditioning=source, reference_latents_method=method
        )
        source = ["method", 0]
    graph["sampler"]["inputs"][side] = source
    return graph


@pytest.mark.parametrize(
    ("sizes", "method", "plan"),
    [
        ([(13, 9)], None, "ulysses"),
        ([(16, 24), (7, 5), (24, 8)], "offset", "ulysses"),
        ([(16, 24), (7, 5)], "offset", "stages"),
        ([(8, 8), (7, 5)], "index", "sharded"),
        ([(8, 8), (7, 5)], "uxo/uno", "ulysses"),
    ],
)
def test_kontext_with_reference_latents_gives_the_stock_latent(error, sizes, method, plan):
    assert error(referring(small(NARROW_DEV), sizes, method), plan) <= TOLERANCE


def test_references_of_both_branches_and_a_batch_over_a_ring_give_the_stock_latent(error):
    graph = referring(referring(small(NARROW_DEV, batch=2), [(16, 24)]), [(7, 5)], side="negative")
    assert error(graph, "ulysses", ulysses=1, ring=2) <= TOLERANCE


def test_reference_latents_one_model_call_at_a_time_give_the_stock_latent(latent_of):
    graph = step_by_step(referring(small(NARROW_DEV), [(16, 24), (7, 5)]))
    swapped = in_workers(graph, "ulysses")
    swapped["sampler"]["class_type"] = "KSampler"
    assert relative_error(latent_of(swapped), latent_of(graph)) <= TOLERANCE


def test_references_and_their_method_change_the_latent(latent_of):
    plain = small(NARROW_DEV)
    one, other = (referring(plain, [(16, 24), (7, 5)], method) for method in ("offset", "index"))
    assert relative_error(latent_of(in_workers(one, "ulysses")), latent_of(plain)) > DIFFERENT
    assert relative_error(latent_of(in_workers(one, "ulysses")), latent_of(other)) > TOLERANCE


def test_a_reference_method_that_is_not_supported_is_refused_by_name(comfyui: ComfyUI):
    graph = referring(small(NARROW_DEV), [(8, 8)], "index_timestep_zero")
    run = comfyui.queue(in_workers(graph, "ulysses"), timeout=300)
    assert run.error is not None
    assert "index_timestep_zero is not supported (offset, index, uxo are)" in run.error.exception_message


def with_picture(graph: Graph, class_type: str, **inputs: Any) -> Graph:
    """Insert a node between prompts and sampler that takes a picture."""
    graph = copy.deepcopy(graph)
    graph["vae"] = node("VAELoader", vae_name="taef1")
    graph["picture"] = node("LoadImage", image="picture.png")
    prompts = {"positive": ["positive", 0], "negative": ["negative", 0]}
    graph["prompts"] = node(class_type, **prompts, vae=["vae", 0], pixels=["picture", 0], **inputs)
    graph["sampler"]["inputs"] |= {
        "positive": ["prompts", 0],
        "negative": ["prompts", 1],
        "latent_image": ["prompts", 2],
    }
    return graph


def filling(graph: Graph, noise_mask: bool) -> Graph:
    """Insert InpaintModelConditioning with a picture and its mask."""
    graph = with_picture(graph, "InpaintModelConditioning", mask=["mask", 0], noise_mask=noise_mask)
    return graph | {"mask": node("LoadImageMask", image="picture.png", channel="red")}


@pytest.mark.parametrize(("noise_mask", "plan"), [(True, "ulysses"), (False, "stages"), (True, "sharded")])
def test_fill_gives_the_stock_latent(error, noise_mask, plan):
    assert error(filling(small("fill"), noise_mask), plan) <= TOLERANCE


def test_canny_and_depth_models_give_the_stock_latent(error):
    assert error(with_picture(small("canny"), "InstructPixToPixConditioning"), "ulysses") <= TOLERANCE


def test_fill_without_a_picture_and_one_model_call_at_a_time_gives_the_stock_latent(error, latent_of):
    assert error(small("fill"), "ulysses") <= TOLERANCE
    graph = step_by_step(filling(small("fill"), True))
    swapped = in_workers(graph, "ulysses")
    swapped["sampler"]["class_type"] = "KSampler"
    assert relative_error(latent_of(swapped), latent_of(graph)) <= TOLERANCE
