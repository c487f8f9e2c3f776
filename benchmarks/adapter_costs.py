"""What another strength of a LoRA costs against loading the model again, in a real ComfyUI on the CPU.

A random FLUX of 0.3 GB in bf16, a LoRA of rank 16 for every linear layer of its blocks, and one step of a picture of 16
tokens. Loading finds the file in the system's cache, so it reads no disk.

Run from the repository root: OMP_NUM_THREADS=1 COMFYUI_PATH=... python -m benchmarks.adapter_costs
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from scripts.comfyui import ComfyUI, Graph
from tests.support.graphs.flux import insert_after_model, ksampler_graph, parallel
from tests.support.server import fill
from tests.support.tiny.flux import save_flux

SIZE = {"heads": 8, "double_blocks": 2, "single_blocks": 4, "dtype": torch.bfloat16}
RANK = 16
ROUNDS = 3
STRENGTHS = (0.7, 0.7, -0.3, None)
"""In turn: put in, the same again, changed, taken out."""

PLANS: dict[str, dict[str, Any]] = {
    "Ulysses 2": {"ulysses": 2},
    "PipeFusion 2": {"pipefusion": 2, "ulysses": 1, "warmup_steps": 1},
    "Ulysses 2, weights sharded": {"ulysses": 2, "weights": "sharded"},
}


def save_lora(path: Path, model: Path) -> None:
    """A LoRA for every matrix of a model's blocks."""
    tensors = {}
    with safe_open(model, "pt") as file:
        shapes = {name: file.get_slice(name).get_shape() for name in file.offset_keys()}
    for name, shape in shapes.items():
        if "blocks" in name and len(shape) == 2:
            layer = f"diffusion_model.{name.removesuffix('.weight')}"
            tensors[f"{layer}.lora_B.weight"] = torch.randn(shape[0], RANK).bfloat16()
            tensors[f"{layer}.lora_A.weight"] = 0.01 * torch.randn(RANK, shape[1]).bfloat16()
    save_file(tensors, path)


def seconds(server: ComfyUI, graph: Graph, seed: int, strength: float | None) -> float:
    """From the sampler node's start to its end; without the LoRA if the strength is None."""
    graph["sampler"]["inputs"]["seed"] = seed
    if strength is not None:
        graph = insert_after_model(graph, "LoraLoaderModelOnly", lora_name="large.safetensors", strength_model=strength)
    run = server.queue(graph, timeout=600).check()
    return run.started["save"] - run.started["sampler"]


def figures(plan: dict[str, Any]) -> list[float]:
    """Medians: loading the model and one step; then a step after each of STRENGTHS."""
    rounds = []
    with tempfile.TemporaryDirectory() as folder:
        server = ComfyUI(os.environ["COMFYUI_PATH"], folder)
        fill(server)
        models = server.base_dir / "models"
        model = save_flux(models / "diffusion_models" / "large.safetensors", **SIZE)
        save_lora(models / "loras" / "large.safetensors", model)
        graph = parallel(ksampler_graph("large", width=64, height=64, steps=1), "cpu:2", **plan)
        with server:
            for number in range(ROUNDS + 1):
                os.utime(model)  # to the workers it is another file now
                loaded = seconds(server, graph, number, None)
                after = [seconds(server, graph, 100 * seed + number, s) for seed, s in enumerate(STRENGTHS, start=1)]
                rounds.append([loaded, *after])
    return [median(values) for values in zip(*rounds[1:], strict=True)]  # the first round starts the workers


def main() -> None:
    """Print the figures."""
    print("| plan | model loaded again | LoRA put in | nothing changed | another strength | LoRA taken out |")
    print("|---|---:|---:|---:|---:|---:|")
    for name, plan in PLANS.items():
        print(f"| {name} | " + " | ".join(f"{value:.2f} s" for value in figures(plan)) + " |", flush=True)


if __name__ == "__main__":
    main()
