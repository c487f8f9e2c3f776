"""Checks that the tests of CogVideoX and of PixArt share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from torch import Tensor

from scripts.comfyui import ComfyUI
from tests.support.graphs.comfyui import LatentOf
from tests.support.graphs.flux import Graph, insert_after_model, node, queue_logged, ways
from tests.support.latents import relative_error, saved_latent
from tests.support.selection import thorough
from tests.support.tiny.flux import save_flux
from tests.support.tiny.models import draw

TOLERANCE = 1e-5

SAMPLERS = ("euler_ancestral", "dpmpp_2m", "dpmpp_2m_sde", "dpmpp_3m_sde", "ddim", "lcm", "deis", "res_multistep")

QUICK_SAMPLERS = ("cogvideox_dpm", "heun")
"""Samplers of the quick run. tests/denoise/test_samplers.py tests each sampler separately."""

WEIGHTS = [pytest.param("replicated", marks=thorough), "sharded"]
"""Weight stores that a LoRA is checked with."""


def samplers(*names: str) -> list[Any]:
    return [pytest.param(sampler, marks=[thorough] * (sampler not in QUICK_SAMPLERS)) for sampler in names]


def choosing(graph: Graph, unet_name: str) -> Graph:
    """Return the graph with another model file."""
    loader = graph["model"]["inputs"] | {"unet_name": unet_name}
    return graph | {"model": node(graph["model"]["class_type"], **loader)}


def models_of(server: ComfyUI) -> Path:
    return server.base_dir / "models" / "diffusion_models"


def save_other_model(server: ComfyUI) -> str:
    """Write a model of neither family, and return its file's name."""
    name = "flux-for-families.safetensors"
    save_flux(models_of(server) / name, single_blocks=1)
    return name


def assert_folder(server: ComfyUI, latent_of: LatentOf, graph: Graph, folder: str) -> None:
    """Assert that a diffusers folder of several files gives the same latent as the graph's file."""
    assert len(list((models_of(server) / folder).glob("*.safetensors"))) > 1
    assert relative_error(latent_of(choosing(graph, folder)), latent_of(graph)) <= TOLERANCE


def assert_compiled(server: ComfyUI, graph: Graph, expected: Tensor) -> None:
    """Assert that compiled blocks give the expected latent.

    On a CPU the backend cudagraphs has no recorder: it runs the same graphs uncompiled.
    """
    graph["plan"]["inputs"]["devices"] = "cpu:1"
    run, log = queue_logged(server, insert_after_model(graph, "TorchCompileModel", backend="cudagraphs"))
    assert relative_error(saved_latent(server, run.check()), expected) <= TOLERANCE
    assert "blocks compiled by cudagraphs" in log
    assert "is not compiled" not in log


def assert_lora(
    server: ComfyUI,
    latent_of: LatentOf,
    graph: Graph,
    name: str,
    layers: tuple[str, ...],
    weights: str,
    prefix: str = "",
) -> None:
    """Assert that a LoRA gives the same latent as a file with the LoRA merged in.

    Args:
        prefix: the prefix of the layers' names in the graph's file.
    """
    models = server.base_dir / "models"
    graph["plan"]["inputs"] |= {"ulysses": 2, "weights": weights}
    merged = load_file(models / "diffusion_models" / f"{name}.safetensors")
    lora: dict[str, Tensor] = {}
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


def assert_loop(server: ComfyUI, latent_of: LatentOf, graph: Graph) -> None:
    """Assert that the workers' loop gives the same latent as ComfyUI's loop with one forward per call."""
    stepped = graph | {
        "cache": node(  # a verbose EasyCache reports each call, so the loop stays in ComfyUI
            "EasyCache", model=["model", 0], reuse_threshold=0.0, start_percent=1.0, end_percent=1.0, verbose=True
        )
    }
    stepped["sampler"] = node("KSampler", **(graph["sampler"]["inputs"] | {"model": ["cache", 0]}))
    run, log = queue_logged(server, stepped)
    run.check()
    assert ways(log) != ["loop"]
    assert relative_error(latent_of(graph), saved_latent(server, run)) <= TOLERANCE
