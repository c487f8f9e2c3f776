"""Model files of all forms: a parallel denoise against ComfyUI's KSampler on the same file, or on the same values."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Type
from safetensors.torch import load_file, save_file

from scripts.comfyui import ComfyUI
from tests.features.conftest import EqualLatents
from tests.support.graphs.comfyui import save_latent
from tests.support.graphs.flux import Graph, insert_after_model, ksampler_graph, node, parallel, step_by_step
from tests.support.latents import relative_error
from tests.support.selection import thorough
from tests.support.server import NARROW, NARROW_DEV, save_picture
from tests.support.tiny.flux import save_flux
from tests.support.tiny.formats import save_diffusers, save_fp8, save_gguf, save_scaled, save_sparse

TOLERANCE = 1e-5
DIFFERENT = 1e-2
STEPS = 2

PLANS: dict[str, dict[str, Any]] = {
    "ulysses": {"ulysses": 2},
    "stages": {"pipefusion": 2, "patches": 2, "warmup_steps": STEPS},
    "sharded": {"ulysses": 2, "weights": "sharded"},
}
PLAIN: dict[str, Any] = {"heads": 2, "seed": 3}
"""Settings of NARROW's weights before their quantisation."""


@pytest.fixture(scope="module", autouse=True)
def _files(comfyui: ComfyUI) -> None:
    models = comfyui.base_dir / "models"
    folder = models / "diffusion_models"
    save_fp8(folder / "e4m3fn.safetensors", torch.float8_e4m3fn, **PLAIN)
    save_fp8(folder / "e5m2.safetensors", torch.float8_e5m2, **PLAIN, guidance=True)
    save_scaled(folder / "scaled-old.safetensors", "old", **PLAIN)
    save_scaled(folder / "scaled-marks.safetensors", "marks", **PLAIN, guidance=True)
    save_scaled(folder / "scaled-metadata.safetensors", "metadata", torch.float8_e5m2, **PLAIN)
    for kind in (Type.Q8_0, Type.Q4_K):
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
    save_file(load_file(folder / "full-fp8.safetensors") | other, models / "checkpoints" / "full-fp8.safetensors")
    save_flux(folder / "fp16-norm-weight.safetensors", heads=2, dtype=torch.float16, norm_scale="weight")
    save_flux(folder / "fill.safetensors", heads=2, channels=96, guidance=True, seed=5)
    save_flux(folder / "canny.safetensors", heads=2, channels=32, guidance=True, seed=6)
    for height, width in ((16, 24), (7, 5), (24, 8), (8, 8)):
        save_latent(comfyui, f"reference-{height}x{width}", 1, 16, height, width)
    save_picture(comfyui, "picture.png", (72, 104), (8, 8))


def small(model: str, **settings: Any) -> Graph:
    """Return a graph of 72x104 pixels, an odd latent of 9x13."""
    return ksampler_graph(model, width=72, height=104, **{"steps": STEPS, "cfg": 2.0} | settings)


def in_workers(graph: Graph, plan: str, choice: str | None = None, **settings: Any) -> Graph:
    """Return the graph on two workers, with another choice in the loader if one is given."""
    graph = parallel(graph, "cpu:2", sampler=True, **PLANS[plan] | settings)
    if choice is not None:
        graph["model"]["inputs"]["unet_name"] = choice
    return graph


def gguf(kind: Type) -> tuple[str, str]:
    """Return the file of the values that the gguf package itself expands, which ComfyUI runs, and the GGUF file."""
    return f"{kind.name}-values", f"{kind.name}.gguf"


@pytest.mark.parametrize(
    ("model", "choice", "plan"),
    [
        ("e4m3fn", None, "sharded"),
        ("scaled-marks", None, "stages"),
        ("scaled-metadata", None, "ulysses"),
        (*gguf(Type.Q4_K), "ulysses"),
        ("fp16-norm-weight", None, "ulysses"),
        ("full-bf16", None, "ulysses"),  # all names have a prefix
        ("diffusers-single", "diffusers-shards", "sharded"),
        ("pipeline", "diffusers/pipeline", "ulysses"),
        ("full-fp8", "checkpoints/full-fp8.safetensors", "stages"),
        # in bf16 below
        pytest.param("scaled-old", None, "ulysses", marks=thorough),
        pytest.param(*gguf(Type.Q8_0), "sharded", marks=thorough),
        pytest.param("e5m2", None, "stages", marks=thorough),  # in the quick run scaled-metadata is e5m2
    ],
)
def test_a_file_gives_the_stock_latent(assert_equal_latents, model, choice, plan):
    assert_equal_latents(in_workers(small(model), plan, choice), small(model))


@pytest.mark.parametrize(  # in the quick run scaled-old for both kinds of fp8
    ("model", "choice"), [("scaled-old", None), gguf(Type.Q8_0), pytest.param("e4m3fn", None, marks=thorough)]
)
def test_quantised_files_lose_no_more_precision_in_bf16_than_in_comfyui(latent_of, model, choice):
    """The error is relative to the latent of the weights before their quantisation."""
    exact = latent_of(small(NARROW))
    graph = insert_after_model(small(model), "ModelComputeDtype", dtype="bf16")
    ours, comfys = (relative_error(latent_of(g), exact) for g in (in_workers(graph, "ulysses", choice), graph))
    print(f"{model}: {ours:.6f}, ComfyUI {comfys:.6f}")
    assert comfys > TOLERANCE
    assert ours <= 1.5 * comfys


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


def test_the_node_shows_loading_and_can_cancel_it(comfyui: ComfyUI, assert_equal_latents: EqualLatents):
    plan = {"pipefusion": 1, "ulysses": 2}
    before = small(NARROW_DEV, seed=31)
    assert_equal_latents(in_workers(before, "ulysses", **plan), before)
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
    assert_equal_latents(in_workers(after, "ulysses", **plan), after)
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


def test_references_of_both_branches_and_a_batch_over_a_ring_give_the_stock_latent(assert_equal_latents):
    graph = referring(referring(small(NARROW_DEV, batch=2), [(16, 24)]), [(7, 5)], side="negative")
    assert_equal_latents(in_workers(graph, "ulysses", ulysses=1, ring=2), graph)


def test_references_and_their_method_change_the_latent(latent_of):
    plain = small(NARROW_DEV)
    one, other = (referring(plain, [(16, 24), (7, 5)], method) for method in ("offset", "index"))
    assert relative_error(latent_of(in_workers(one, "ulysses")), latent_of(plain)) > DIFFERENT
    assert relative_error(latent_of(in_workers(one, "ulysses")), latent_of(other)) > TOLERANCE


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


def referring_flux(sizes: list[tuple[int, int]], method: str | None = None) -> Graph:
    return referring(small(NARROW_DEV), sizes, method)


PICTURES: dict[str, tuple[Graph, str]] = {
    "three references": (referring_flux([(16, 24), (7, 5), (24, 8)], "offset"), "ulysses"),
    "references, offset": (referring_flux([(16, 24), (7, 5)], "offset"), "stages"),
    "references, index": (referring_flux([(8, 8), (7, 5)], "index"), "sharded"),
    "references, uxo": (referring_flux([(8, 8), (7, 5)], "uxo/uno"), "ulysses"),
    "fill": (filling(small("fill"), True), "sharded"),
    "fill without noise mask": (filling(small("fill"), False), "stages"),
    "canny": (with_picture(small("canny"), "InstructPixToPixConditioning"), "ulysses"),
}
"""Graphs of Kontext, Fill and Canny, and their plans."""

QUICK_PICTURES = ("three references", "references, index", "fill", "canny")
"""Names in PICTURES that the quick run has; tests/engine/test_products.py has references in stages."""


@pytest.mark.parametrize(
    ("graph", "plan"),
    [pytest.param(*case, id=name, marks=[thorough] * (name not in QUICK_PICTURES)) for name, case in PICTURES.items()],
)
def test_pictures_next_to_the_latent_give_the_stock_latent(assert_equal_latents, graph, plan):
    assert_equal_latents(in_workers(graph, plan), graph)


@thorough  # in the quick run test_flux_and_wan has references one model call at a time
def test_a_picture_to_fill_one_model_call_at_a_time_gives_the_stock_latent(assert_equal_latents):
    graph = step_by_step(PICTURES["fill"][0])
    assert_equal_latents(parallel(graph, ulysses=2), graph)
