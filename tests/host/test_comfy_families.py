"""ComfyUI's own models through Load Parallel Diffusion Model, against the stock loader in the same ComfyUI."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from scripts.comfyui import ComfyUI
from tests.host.conftest import relative_error
from tests.host.graphs import Graph, insert_after_model, node
from tests.host.test_families import refused
from tests.tiny_comfy import TINY, save_tiny
from tests.tiny_models import draw

TOLERANCE = 1e-5
TOKENS = {"positive": 7, "negative": 4}

LATENTS = {
    "flux2": node("EmptyFlux2LatentImage", width=112, height=80, batch_size=1),
    "wan": node("EmptyHunyuanLatentVideo", width=80, height=72, length=9, batch_size=1),
    "vace": node("EmptyHunyuanLatentVideo", width=80, height=64, length=9, batch_size=1),  # it takes no odd latent
    "wan22_5b": node("Wan22ImageToVideoLatent", vae=["vae", 0], width=160, height=96, length=9, batch_size=1),
}

LatentOf = Callable[[Graph], Tensor]


@pytest.fixture(scope="module", autouse=True)
def _files(comfyui: ComfyUI) -> None:
    folder = comfyui.base_dir / "models" / "diffusion_models"
    for name in ("flux2", "wan", "vace"):
        save_tiny(folder, name)
        for side, tokens in TOKENS.items():
            save_file(
                {"cond": draw(1, tokens, TINY[name].text, seed=tokens)},
                comfyui.input_dir / f"{name}-{side}.safetensors",
            )


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


@pytest.mark.parametrize("name", ["flux2", "wan", "vace"])
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
    ],
)
def test_every_form_gives_the_stock_result(name: str, plan: dict[str, Any], latent_of: LatentOf) -> None:
    graph = graph_of(name)
    assert relative_error(latent_of(spread(graph, **plan)), latent_of(graph)) <= TOLERANCE


def test_references(comfyui: ComfyUI, latent_of: LatentOf) -> None:
    """FLUX.2 with a reference picture, in the loop and with one forward a call."""
    reference = draw(1, 128, 3, 4, seed=8)
    save_file(
        {"latent_tensor": reference, "latent_format_version_0": torch.tensor([])},
        comfyui.input_dir / "reference.latent",
    )
    graph = graph_of("flux2", cfg=1.0)
    graph["reference"] = node("LoadLatent", latent="reference.latent")
    graph["with reference"] = node("ReferenceLatent", conditioning=["positive", 0], latent=["reference", 0])
    graph["sampler"]["inputs"]["positive"] = ["with reference", 0]
    stock = latent_of(graph)
    assert relative_error(latent_of(spread(graph)), stock) <= TOLERANCE
    stepwise = graph | {"sampler": node("KSampler", **graph["sampler"]["inputs"] | {"sampler_name": "dpm_fast"})}
    assert relative_error(latent_of(spread(stepwise, strict=False)), latent_of(stepwise)) <= TOLERANCE


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
