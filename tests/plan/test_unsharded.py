"""Plans of models whose forward runs unsharded on each rank: the ranks' work, costs and refusals."""

from __future__ import annotations

import dataclasses

import pytest

from parallel_backend.errors import Refused
from parallel_backend.layout import length
from parallel_backend.models.comfyui.plan_shape import unsharded_shape
from parallel_backend.plan import ModelShape, ParallelPlan, ResolvedPlan, Workload, check, feasible
from parallel_backend.plan.choose import best
from parallel_backend.plan.predict.measure import BlockTimes, measured_profile
from parallel_backend.plan.predict.profiles import DenoiseJob, ForwardTime, Profile
from parallel_backend.plan.split import forward_times, share_batch
from tests.support.plans import MEASURED, cpu_plan

SDXL: ModelShape = unsharded_shape("SDXL", 2_600_000_000, 4)
JOB = DenoiseJob(image_tokens=128 * 128, text_tokens=77, batch=1, has_uncond=True, item_bytes=2e9)


def degrees(requested_plan: ParallelPlan, batch: int, *, has_uncond: bool, gpus: int = 0) -> list[tuple[int, int, int]]:
    found = feasible(requested_plan, gpus, SDXL.limits, Workload(batch, has_uncond, 1))
    return [(plan.world_size, plan.data, plan.cfg) for plan in found]


def profile(*forwards: ForwardTime, memory: float = 80e9) -> Profile:
    return dataclasses.replace(measured_profile(MEASURED, (memory,) * len(forwards), gpus=True), forwards=forwards)


def test_automatic_devices_are_only_those_that_have_work() -> None:
    assert degrees(ParallelPlan(), 1, has_uncond=True, gpus=8) == [(2, 1, 2)]
    assert degrees(ParallelPlan(), 1, has_uncond=False, gpus=8) == [(1, 1, 1)]
    assert degrees(ParallelPlan(), 3, has_uncond=True, gpus=8) == [(6, 3, 2)]
    assert degrees(ParallelPlan(cfg=1), 3, has_uncond=True, gpus=8) == [(3, 3, 1)]
    assert set(degrees(ParallelPlan(), 4, has_uncond=True, gpus=4)) == {(4, 2, 2), (4, 4, 1)}


def test_devices_that_are_named_are_all_used_or_refused() -> None:
    assert set(degrees(ParallelPlan(devices="cpu:2"), 2, has_uncond=True)) == {(2, 1, 2), (2, 2, 1)}
    with pytest.raises(Refused, match="with a batch of 1 it uses two GPUs at most; use 2 devices, or a larger batch"):
        degrees(ParallelPlan(devices="cpu:4"), 1, has_uncond=True)


def test_a_plan_is_checked_before_a_job_is_known() -> None:
    assert check(ParallelPlan(devices="cpu:4"), 0, SDXL.limits) == ("cpu",) * 4
    with pytest.raises(
        Refused, match=r"^ring 2 cannot be used, because this model is split by prompts and batches only"
    ):
        check(ParallelPlan(devices="cpu:4", ring=2), 0, SDXL.limits)


def test_start_and_item_times_follow_from_two_measured_forwards() -> None:
    first, second = forward_times(BlockTimes(((3.0, 5.0), (4.0, 4.0)), (1, 2)))
    assert first == ForwardTime(start=1.0, item=2.0)
    assert second == ForwardTime(start=4.0, item=4.0)  # an item that adds no time counts as a whole forward


def test_a_batch_is_cut_by_pace() -> None:
    plan = cpu_plan(data=2)
    assert share_batch([ForwardTime(0, 1.0), ForwardTime(0, 1.02)], plan) is plan
    uneven = share_batch([ForwardTime(0, 1.0), ForwardTime(0, 3.0)], plan)
    assert [length(part) for part in uneven.parts(8)] == [6, 2]
    assert [length(part) for part in uneven.parts(2)] == [1, 1]
    assert "the batch 100 : 33 by speed" in uneven.describe()
    both = share_batch([ForwardTime(0, 1.0), ForwardTime(0, 3.0)] * 2, cpu_plan(data=2, cfg=2))
    assert both.batch_shares == ()  # each part waits for its slower branch


def test_rows_of_one_call_are_divided_over_all_groups_by_pace() -> None:
    plan = share_batch([ForwardTime(0, 1.0)] * 2 + [ForwardTime(0, 3.0)] * 2, cpu_plan(data=2, cfg=2))
    groups = plan.groups(16)
    assert [length(part) for part in groups] == [6, 6, 2, 2]
    assert [part.start for part in groups[1:]] == [part.stop for part in groups[:-1]]
    assert all(map(length, plan.groups(4)))


def test_the_faster_plan_is_chosen_and_one_gpu_suggested_if_equally_fast() -> None:
    def chosen(start: float, item: float) -> tuple[ResolvedPlan, bool]:
        requested_plan = feasible(ParallelPlan(), 2, SDXL.limits, Workload(1, True, 1))
        choice = best(requested_plan, SDXL, JOB, profile(ForwardTime(start, item), ForwardTime(start, item)))
        return choice.plan, choice.better_alone

    plan, alone = chosen(0.01, 0.2)
    assert (plan.cfg, alone) == (2, False)
    _, alone = chosen(0.2, 1e-7)  # both prompts together take no longer than one, and the exchange takes time
    assert alone


def test_memory_is_comfyuis_estimate_for_a_forward() -> None:
    requested_plan = feasible(ParallelPlan(), 2, SDXL.limits, Workload(1, True, 1))
    time = ForwardTime(0.0, 0.1)
    choice = best(requested_plan, SDXL, JOB, profile(time, time))
    weights, both = 2 * SDXL.parameters, 2 * JOB.item_bytes
    assert choice.single.breakdown.memory == pytest.approx(weights + both, rel=0.2)
    assert choice.ranking[0].breakdown.memory == pytest.approx(weights + JOB.item_bytes, rel=0.2)
    with pytest.raises(Refused, match=r"Not enough GPU memory: the smallest plan, cfg 2, needs"):
        best(requested_plan, SDXL, JOB, profile(time, time, memory=6e9))
