"""Streamed weights in real workers: exact results, one copy in host memory for all ranks, and at most the window on
the device.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from parallel_backend.mesh_axes import PLAN_AXES
from parallel_backend.plan import ResolvedPlan
from parallel_backend.weights.files.checkpoint import read_header
from tests.engine.conftest import TOLERANCE, Job, Runner, Simulated, sigmas
from tests.support.latents import relative_error
from tests.support.plans import cpu_plan
from tests.support.selection import thorough
from tests.support.tiny.flux import save_flux

STEPS, BLOCKS = 2, 8
PLANS = [
    # test_blocks_are_copied_once_if_all_fit_on_the_device streams under this plan
    pytest.param(cpu_plan(ulysses=2, blocks=BLOCKS), marks=thorough),
    cpu_plan(cfg=2, pipefusion=2, warmup_steps=STEPS, blocks=BLOCKS),
    pytest.param(cpu_plan(ring=2, blocks=BLOCKS), marks=thorough),
    pytest.param(cpu_plan(data=2, blocks=BLOCKS), marks=thorough),
    pytest.param(cpu_plan(pipefusion=2, patches=3, blocks=BLOCKS), marks=thorough),
]


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    path = save_flux(tmp_path_factory.mktemp("streamed") / "8-blocks.safetensors", heads=2, single_blocks=BLOCKS - 1)
    return Job(path, sigmas(STEPS))


@pytest.mark.parametrize("whole", PLANS, ids=lambda plan: plan.degrees)
def test_streamed_weights_need_one_window_and_one_copy_on_the_host(
    run: Runner, job: Job, simulated: Simulated, whole: ResolvedPlan
) -> None:
    job = replace(job, batch=whole.data)
    run.end_workers()  # models of other tests would leave the devices under the smaller limit
    run(job, whole)
    assert run.answer is not None
    replicated = max(report.weights for report in run.answer.reports)
    settings = {name: getattr(whole, name) for name in (*PLAN_AXES, "patches", "warmup_steps")}
    limit = 0.95 * replicated
    plan = cpu_plan(weights="streamed", blocks=BLOCKS, memory_limit=limit * whole.world_size / 1e9, **settings)
    streamed = run(job, plan)
    assert relative_error(streamed, simulated(job, whole.patches, whole.warmup_steps)) <= TOLERANCE
    reports = run.answer.reports
    entries = read_header(job.path).entries
    blocks = sum(e.nbytes for name, e in entries.items() if name.startswith(("double_blocks", "single_blocks")))
    copied = sum(report.on_host for report in reports)
    assert copied == pytest.approx(blocks, rel=0.01), "one copy, not one a rank"
    assert all(report.weights <= limit for report in reports)
    assert sum(report.read for report in reports) == sum(entry.nbytes for entry in entries.values())
    again = run(job, plan)
    assert torch.equal(again, streamed)
    assert sum(report.read for report in run.answer.reports) == 0
    assert any(report.sent.get("weights") for report in run.answer.reports), "some blocks come and go"
    run.backend.release(reports[0].models_on_device[0].model)
    assert torch.equal(run(job, plan), streamed)


@thorough
@pytest.mark.parametrize(
    ("weights", "compiler"), [("streamed", "aot_eager"), ("sharded", "aot_eager"), ("streamed", "inductor")]
)
def test_blocks_with_streamed_or_sharded_weights_can_be_compiled(
    run: Runner, job: Job, simulated: Simulated, weights: str, compiler: str
) -> None:
    plan = cpu_plan(ulysses=2, blocks=BLOCKS, weights=weights, memory_limit=0.05)
    for _ in range(2):
        assert relative_error(run(job, plan, compiler=compiler), simulated(job)) <= TOLERANCE
        assert run.answer is not None
        assert run.answer.frame.message.uncompiled == ()
        assert run.answer.reports[0].sent.get("weights"), "some come and go"


def test_blocks_are_copied_once_if_all_fit_on_the_device(run: Runner, job: Job) -> None:
    plan = cpu_plan(ulysses=2, blocks=BLOCKS, weights="streamed")
    run(job, plan)
    first = [report.sent["weights"] for report in run.answer.reports]
    run(job, plan)
    assert all(first), "each block once"
    assert [report.sent.get("weights", 0) for report in run.answer.reports] == [0, 0]
