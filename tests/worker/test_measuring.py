"""Timing a model's blocks gives signs of progress, however long one forward is."""

from __future__ import annotations

from pathlib import Path

import torch

from parallel_backend.models.families import FAMILIES
from parallel_backend.weights.files.checkpoint import read_header
from parallel_backend.worker.requests.measuring import RUNS, time_blocks
from parallel_backend.worker.requests.unsharded import ForwardExample
from tests.support.comfy_oracle import comfy_on_path
from tests.support.plans import cpu_plan
from tests.support.tiny.flux import CHANNELS, POOLED_WIDTH, TEXT_WIDTH, save_flux
from tests.support.tiny.models import draw

comfy_on_path()

TOKENS = 500
CPU = torch.device("cpu")


def test_a_long_text_gives_signs_of_progress_with_every_block(tmp_path: Path) -> None:
    family = FAMILIES["comfyui"]
    _, config = family.inspect(read_header(save_flux(tmp_path / "tiny.safetensors", heads=1)))
    tensors = {
        "x": draw(1, CHANNELS, 4, 4, seed=0),
        "timestep": torch.ones(1),
        "context": draw(1, TOKENS, TEXT_WIDTH, seed=1),
        "y": draw(1, POOLED_WIDTH, seed=2),
    }
    marks = 0

    def mark() -> None:
        nonlocal marks
        marks += 1

    with torch.inference_mode():
        seconds, counts = time_blocks(family, config, cpu_plan(), ForwardExample(CPU, torch.float32, tensors, {}, mark))
    assert counts == (1, 2)
    assert all(each > 0 for each in seconds)
    assert marks == RUNS * (2 * len(counts) + 1)
