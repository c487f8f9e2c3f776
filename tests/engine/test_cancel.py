"""Cancel ends a denoise with the running model call, also while some ranks compute and others only gather weights."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from parallel_backend.errors import Cancelled
from parallel_backend.host.workers.pending_request import RequestContext
from tests.engine.conftest import SCHNELL, Runner, prompt_specs, sigmas
from tests.support.plans import cpu_plan
from tests.support.programs import encoded_program
from tests.support.tiny.flux import POOLED_WIDTH, TEXT_WIDTH, save_flux
from tests.support.tiny.models import draw

PATIENCE = 2.0
"""Seconds after the running model call by which a cancelled request has ended."""

TEXTS = (9, 17, 25, 33, 41)
"""Text lengths of the positive prompts, with one forward each. The negative side has one prompt."""


def lopsided(runner: Runner, path: Path, steps: int, is_cancelled: Callable[[], bool] = lambda: False) -> Tensor:
    """Run a denoise in which one rank computes the positive side, with five times the work of the negative side."""
    tensors = {"x": draw(1, 16, 16, 16, seed=5), "sigmas": sigmas(steps)}
    tensors["program"] = encoded_program("euler", tensors["sigmas"], tensors["x"])
    prompts = [
        {"context": draw(1, length, TEXT_WIDTH, seed=length), "y": draw(1, POOLED_WIDTH, seed=length)}
        for length in TEXTS
    ]
    positive, negative = prompt_specs("positive", prompts, tensors), prompt_specs("negative", prompts[:1], tensors)
    fields: dict[str, Any] = {"sampling": SCHNELL, "cfg": 2.0, "positive": positive, "negative": negative}
    plan = cpu_plan(cfg=2, weights="sharded", blocks=4)
    return runner.sample("comfyui", path, tensors, plan, RequestContext(is_cancelled), **fields)


def test_cancel_while_a_rank_waits_for_weights_ends_with_the_model_call(run: Runner, tmp_path: Path) -> None:
    path = save_flux(tmp_path / "model.safetensors", heads=2, single_blocks=3)
    expected = lopsided(run, path, 2)
    assert run.answer is not None
    call = max(report.seconds for report in run.answer.reports) / 2
    workers = run.workers()
    pressed: list[float] = []

    def is_cancelled() -> bool:
        ranks = [rank for group in run.backend.status().groups for rank in group.ranks]
        if not pressed and ranks and ranks[-1].phase == "sampling" and ranks[-1].waiting:
            pressed.append(time.monotonic())
        return bool(pressed)

    with pytest.raises(Cancelled):
        lopsided(run, path, 50, is_cancelled)
    took = time.monotonic() - pressed[0]
    print(f"cancelled after {took:.2f} s; a model call takes {call:.2f} s")
    assert took <= call + PATIENCE
    assert run.workers() == workers
    assert torch.equal(lopsided(run, path, 2), expected)
