"""Plans are judged by what is free when they are made, with what workers take besides the model."""

from __future__ import annotations

import logging

import msgspec
import pytest

from parallel_backend.diffusion import ModelSpec
from parallel_backend.errors import Refused
from parallel_backend.host.planner import SLACK, Planner, Question
from parallel_backend.plan import ParallelPlan, ResolvedPlan, Workload
from parallel_backend.plan.cost import Job, connections, cost, rows_connections
from parallel_backend.plan.known_models import known_model
from parallel_backend.plan.measure import KERNEL_BYTES, BlockTimes, measured_profile
from tests.plans import MEASURED, cpu_plan

FLUX = known_model("flux-dev").shape
JOB = Job(image_tokens=4096, text_tokens=512)
TOTAL = 25.3e9
"""Bytes of a card of 24 GB."""

TAKEN = 1.4e9
"""By a desktop and ComfyUI's context."""

CARD = msgspec.structs.replace(MEASURED, connection=3e7)


def question(**wish: object) -> Question:
    spec = ModelSpec("comfyui", "flux.safetensors", 1, 2, "bfloat16")
    return Question(ParallelPlan(**wish), 2, spec, FLUX, Workload(1, False, 64), JOB)  # type: ignore[arg-type]


def choose(planner: Planner, free: float, asked: Question) -> ResolvedPlan:
    def blocks(plan: ResolvedPlan) -> BlockTimes:
        raise AssertionError("no stages here")

    return planner.choose(asked, lambda plan: free, lambda plan: CARD, blocks).choice.plan


def gpu_plan(**degrees: int) -> ResolvedPlan:
    plan = cpu_plan(**degrees, blocks=57)
    return msgspec.structs.replace(plan, devices=tuple(f"cuda:{rank}" for rank in range(plan.world_size)))


def test_flux_in_bf16_fits_a_whole_card_of_24_gb_and_not_one_that_is_in_use():
    assert choose(Planner(), TOTAL, question()).ulysses == 2
    with pytest.raises(Refused, match=r"needs 24\.\d\d GB .* and each has 23\.90 GB free: use pipefusion 2, which"):
        choose(Planner(), TOTAL - TAKEN, question())


def test_what_is_free_is_asked_for_each_time():
    planner, asked = Planner(), question()
    choose(planner, TOTAL, asked)
    with pytest.raises(Refused, match=r"each has 23\.90 GB free"):
        choose(planner, TOTAL - TAKEN, asked)
    assert choose(planner, TOTAL, asked).ulysses == 2


def test_the_same_plan_is_not_told_twice(caplog):
    caplog.set_level(logging.INFO)
    planner, asked = Planner(), question()
    needed = cost(gpu_plan(ulysses=2), FLUX, JOB, measured_profile(CARD, TOTAL, gpus=True)).memory
    plan = choose(planner, needed, asked)
    caplog.clear()
    assert choose(planner, needed - 0.9 * SLACK, asked) == plan  # the kernels that its first run has loaded
    assert not caplog.text
    assert choose(planner, 30e9, asked) == plan  # now one GPU would do, which is told
    caplog.clear()
    assert choose(planner, 80e9, asked) == plan
    assert not caplog.text


def test_what_the_user_allows_is_less_than_what_is_free():
    with pytest.raises(Refused, match=r"each may use 20\.00 GB \(memory_limit 20\)"):
        choose(Planner(), TOTAL, question(memory_limit=20.0))


def test_communicators_take_memory_for_each_pair_of_gpus():
    assert connections(gpu_plan(ulysses=8)) == 7 + 7  # the axis, and the sequence
    assert connections(gpu_plan(ring=2, ulysses=4)) == 1 + 3 + 7
    assert connections(gpu_plan(pipefusion=4, cfg=2)) == 3 + 3 + 1  # there and back, and the other side
    assert connections(cpu_plan(ulysses=8)) == rows_connections(cpu_plan(ulysses=8)) == 0
    assert rows_connections(gpu_plan(ring=2, ulysses=4)) == 7  # so that a decode finds room for its own
    profile = measured_profile(CARD, TOTAL, gpus=True)
    free = measured_profile(msgspec.structs.replace(CARD, connection=0.0), TOTAL, gpus=True)
    plan = gpu_plan(ulysses=8)
    assert cost(plan, FLUX, JOB, profile).memory - cost(plan, FLUX, JOB, free).memory == pytest.approx((14 + 7) * 3e7)
    assert free.device.context == KERNEL_BYTES
