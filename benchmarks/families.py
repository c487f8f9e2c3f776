"""Runs each declared class in a real ComfyUI, under each kind of split, and compares it with the stock loader.

    COMFYUI_PATH=... python -m benchmarks.families [NAME ...]

The inputs are those of `benchmarks.undeclared`: the tests' small files, and the graphs of tests/families with ComfyUI's own
conditioning and samplers. NAMEs choose inputs; by default the first input of each file runs. All steps of PipeFusion are exact.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.undeclared import outputs
from benchmarks.undeclared_inputs import Job, inputs
from parallel_backend.comfyui_folder import comfyui_version
from parallel_backend.models.comfyui.detection import detect
from parallel_backend.weights.files.checkpoint import read_header
from scripts.comfyui import ComfyUI
from tests.support.comfy_oracle import FOLDER
from tests.support.copies.sized import sized_copy
from tests.support.graphs.comfyui import spread
from tests.support.graphs.family_tests import ONE_CALL
from tests.support.latents import relative_error

PLANS: Mapping[str, Mapping[str, Any]] = {
    "ulysses 2": {"cfg": 1, "ulysses": 2},
    "ring 2": {"cfg": 1, "ring": 2},
    "cfg 2": {"cfg": 2},
    "pipefusion 2": {"cfg": 1, "pipefusion": 2, "warmup_steps": 99},
}


def row(server: ComfyUI, name: str, make: Job, seen: set[str]) -> list[str] | None:
    """Return a line of the table: class, input, and the error or the refusal under each plan.

    Return None for a repeated file.
    """
    graph = make(server)
    file = graph["model"]["inputs"]["unet_name"]
    if not sys.argv[1:] and file in seen:
        return None
    seen.add(file)
    *_, described = detect(read_header(server.base_dir / "models" / "diffusion_models" / file))
    expected = outputs(server, graph)
    if isinstance(expected, str):
        return [type(described).__name__, name, f"stock ComfyUI: {expected}", "", "", ""]
    strict = file.partition(".")[0] not in ONE_CALL
    told = []
    for plan in PLANS.values():
        got = outputs(server, spread(graph, "cpu:2", strict=strict, **plan))
        told.append(got if isinstance(got, str) else f"{max(map(relative_error, got, expected)):.1e}")
    return [type(described).__name__, name, *told]


def main() -> None:
    """Print the table, each line as soon as it is found."""
    chosen = {name: make for name, make in inputs() if name in sys.argv[1:] or not sys.argv[1:]}
    torch.set_num_threads(1)
    print(f"## ComfyUI {comfyui_version(FOLDER)}\n")
    print("| class | input |", " | ".join(PLANS), "|")
    print("| --- " * (2 + len(PLANS)) + "|", flush=True)
    seen: set[str] = set()
    with tempfile.TemporaryDirectory() as folder, sized_copy(Path(folder)) as server:
        for name, make in chosen.items():
            if (line := row(server, name, make, seen)) is not None:
                print("|", " | ".join(line), "|", flush=True)


if __name__ == "__main__":
    main()
