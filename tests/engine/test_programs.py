"""A malformed sampler program never runs, and the workers stay."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from parallel_backend.denoise.program import ModelEvaluation, Program, encoded
from parallel_backend.diffusion import PromptSpec
from parallel_backend.errors import Refused
from tests.engine.conftest import SCHNELL, Runner
from tests.support.plans import cpu_plan
from tests.support.programs import encoded_program
from tests.support.tiny.flux import POOLED_WIDTH, TEXT_WIDTH, save_flux


def test_a_malformed_program_is_refused_and_the_workers_stay(run: Runner, tmp_path: Path) -> None:
    path = save_flux(tmp_path / "model.safetensors", heads=4, single_blocks=3)
    tensors = {"x": torch.randn(1, 16, 8, 8), "sigmas": torch.tensor([1.0, 0.5, 0.0])}
    tensors |= {"prompt.context": torch.randn(1, 9, TEXT_WIDTH), "prompt.y": torch.randn(1, POOLED_WIDTH)}
    prompt = PromptSpec({"context": "prompt.context", "y": "prompt.y"})
    fields = {"sampling": SCHNELL, "cfg": 1.0, "positive": [prompt], "negative": None}
    plan = cpu_plan(ulysses=2, blocks=4)
    good = encoded_program("euler", tensors["sigmas"], tensors["x"])
    assert run.sample("comfyui", path, tensors | {"program": good}, plan, **fields).isfinite().all()
    before = run.workers()
    bad = encoded(Program("bad", (ModelEvaluation(5, 1.0),), 0))
    with pytest.raises(
        Refused, match=r"the program of the sampler bad is not well-formed \(entry 0: unknown value 5\)"
    ):
        run.sample("comfyui", path, tensors | {"program": bad}, plan, **fields)
    assert run.sample("comfyui", path, tensors | {"program": good}, plan, **fields).isfinite().all()
    assert run.workers() == before
