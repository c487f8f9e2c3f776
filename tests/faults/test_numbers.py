"""NaN is reported with its step, and the workers continue."""

from __future__ import annotations

import dataclasses
import time

import pytest
import torch
from safetensors.torch import load_file, save_file

from parallel_backend.errors import NotFinite
from tests.engine.conftest import Job, sigmas
from tests.faults.bench import BOUND, PLANS, STEPS
from tests.support.selection import thorough

OUTCOME = "one error with the step; the workers stay"


# the host checks the model's output, whatever the number of workers
@pytest.mark.parametrize("workers", [2, pytest.param(4, marks=thorough)])
def test_nan_in_the_weights_is_one_error_and_the_workers_stay(bench, tmp_path, workers):
    tensors = load_file(bench.job.path)
    tensors["final_layer.linear.bias"][0] = torch.nan
    save_file(tensors, tmp_path / "damaged.safetensors")
    job = Job(tmp_path / "damaged.safetensors", sigmas(STEPS), height=8, width=8)
    bench.assert_right(workers)
    before = bench.workers()
    started = time.monotonic()
    with pytest.raises(NotFinite, match=r"^Step 1 of 3: the model's output holds \d+ values of 1024 .* is damaged"):
        bench.run(job, PLANS[workers])
    seconds = time.monotonic() - started
    bench.assert_right(workers)
    assert bench.workers() == before
    bench.held("NaN in the weights", OUTCOME, seconds, BOUND)


def test_sigmas_that_a_sampler_divides_by_are_named(bench):
    job = dataclasses.replace(bench.job, sigmas=torch.zeros(2))
    bench.assert_right(2)
    before = bench.workers()
    with pytest.raises(NotFinite, match=r"^Step 1 of 1: the sampler's step .* because the sigmas go from 0 to 0: "):
        bench.run(job, PLANS[2])
    assert bench.run(dataclasses.replace(job, sampler="lcm"), PLANS[2]).isfinite().all()  # as with ComfyUI's
    assert bench.workers() == before


@pytest.mark.parametrize("step", [1, 2, 3])
def test_nan_from_a_later_step_is_reported_with_the_step(bench, step):
    broken = sigmas(STEPS)
    broken[step] = torch.nan
    job = dataclasses.replace(bench.job, sigmas=broken)
    bench.assert_right(2)
    started = time.monotonic()
    said = rf"^Step {step} of 3: the sampler's step gives 1024 values of 1024 .* because the sigmas go from .* to nan: "
    with pytest.raises(NotFinite, match=said):
        bench.run(job, PLANS[2])
    seconds = time.monotonic() - started
    bench.assert_right(2)
    bench.held("NaN from a step on", OUTCOME, seconds, BOUND)
