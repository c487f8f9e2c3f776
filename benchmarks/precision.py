"""Measures the error of bf16 and fp8 beside fp32: ComfyUI's own KSampler, and this pack on two workers.

From the repository's root: COMFYUI_PATH=... python -m benchmarks.precision [--seeds 3] [--steps 8]

A real ComfyUI runs five models on the CPU, each from a file in bf16 and from a file with its blocks' matrices in scaled fp8.
FLUX.1 is the trained sprites model; the other models are small and random. Each error is relative (L2), between latents of one
seed. The reference is KSampler on the file in bf16, computed in fp32.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from parallel_backend import markdown
from scripts.comfyui import ComfyUI, Graph
from tests.support.graphs.comfyui import TOKENS, graph_of, save_families, spread
from tests.support.graphs.flux import insert_after, insert_after_model, ksampler_graph
from tests.support.graphs.sound import sound_graph
from tests.support.latents import relative_error, saved_latent
from tests.support.server import fill
from tests.support.tiny.formats import write_scaled

SPRITES = "sprites-flux-schnell"
FAMILIES = {
    "FLUX.1": SPRITES,
    "FLUX.2": "flux2",
    "Wan": "wan",
    "HunyuanVideo 1.5": "hunyuan15",
    "MiniMax-H3": "minimax",
}
"""The file of each family's model."""

FLUX2_GUIDANCE = 4.0
"""The value of ComfyUI's template. A thousand times this value is a bf16 number; a thousand times the default of 3.5 is none."""

FORMS = ("bf16", "fp8")
HEAD = (
    "model",
    *(f"{form}: {run}" for form in FORMS for run in ("ComfyUI's own", "two workers")),
    *(f"{form}: between the two" for form in FORMS),
)
PLAN: dict[str, Any] = {"devices": "cpu:2", "cfg": 1, "ulysses": 2}


def save_models(server: ComfyUI) -> None:
    """Write each model's two files, and the prompts."""
    fill(server)
    save_families(server, *(name for name in FAMILIES.values() if name != SPRITES))
    folder = server.base_dir / "models" / "diffusion_models"
    for name in FAMILIES.values():
        tensors = {key: tensor.bfloat16() for key, tensor in load_file(folder / f"{name}.safetensors").items()}
        save_file(tensors, folder / f"{name}-bf16.safetensors")
        write_scaled(
            folder / f"{name}-fp8.safetensors", {key: each.float() for key, each in tensors.items()}, "metadata"
        )


def stock(name: str, seed: int, steps: int) -> Graph:
    """Return a family's graph with ComfyUI's own loader and sampler."""
    if name == SPRITES:
        return ksampler_graph(name, positive="red-circle-on-white", negative="empty", seed=seed, steps=steps, cfg=2.0)
    graph = (sound_graph if name == "minimax" else graph_of)(name, seed=seed, steps=steps)
    if name == "flux2":
        for prompt in TOKENS:
            graph = insert_after(graph, prompt, "FluxGuidance", "conditioning", guidance=FLUX2_GUIDANCE)
    return graph


def computed(graph: Graph, form: str, dtype: str) -> Graph:
    """Return the graph with the file of this form, and with compute in this dtype."""
    graph = insert_after_model(graph, "ModelComputeDtype", dtype=dtype)
    name = graph["model"]["inputs"]["unet_name"].removesuffix(".safetensors")
    graph["model"]["inputs"]["unet_name"] = f"{name}-{form}.safetensors"
    return graph


def errors(latent_of: Callable[[Graph], Tensor], graph: Graph) -> list[float]:
    """Return the errors of a graph, in the order of the table's columns."""
    exact = latent_of(computed(graph, "bf16", "fp32"))
    rounded = [computed(graph, form, "bf16") for form in FORMS]
    runs = [(latent_of(each), latent_of(spread(each, **PLAN))) for each in rounded]
    from_exact = [relative_error(latent, exact) for run in runs for latent in run]
    return from_exact + [relative_error(ours, comfyuis) for comfyuis, ours in runs]


def main() -> None:
    """Measure and print the table: the median over the seeds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    with tempfile.TemporaryDirectory() as folder, ComfyUI(os.environ["COMFYUI_PATH"], Path(folder)) as server:
        save_models(server)
        for family, name in FAMILIES.items():
            found = [
                errors(
                    lambda graph: saved_latent(server, server.queue(graph, timeout=600).check()),
                    stock(name, seed, options.steps),
                )
                for seed in range(options.seeds)
            ]
            rows.append((family, *(f"{statistics.median(column):.2e}" for column in zip(*found, strict=True))))
    print(markdown.table(HEAD, rows))


if __name__ == "__main__":
    main()
