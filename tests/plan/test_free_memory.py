"""Plans are judged by the memory that is free when they are made, with the workers' own use besides the model."""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Sequence
from dataclasses import replace

import msgspec
import pytest

from parallel_backend.errors import Refused
from parallel_backend.host.planning.planner import SLACK, Planner, PlanRequest
from parallel_backend.models.comfyui.plan_shape import unsharded_shape
from parallel_backend.plan import ParallelPlan, ResolvedPlan, Workload
from parallel_backend.plan.predict.cost import StepCost, cost
from parallel_backend.plan.predict.known_models import known_model
from parallel_backend.plan.predict.measure import KERNEL_BYTES, BlockTimes, measured_profile
from parallel_backend.plan.predict.memory import connections, rows_connections
from parallel_backend.plan.predict.profiles import DenoiseJob, ModelShape, Profile
from parallel_backend.plan.split import share_by_memory
from tests.plan.jobs import FLUX, JOB, TOTAL, question
from tests.support import plans
from tests.support.plans import MEASURED, cpu_plan

TAKEN = 1.4e9
"""Bytes that a desktop and ComfyUI's context use."""

CARD = msgspec.structs.replace(MEASURED, connection=3e7)


def choose(planner: Planner, free: float | Sequence[float], asked: PlanRequest) -> ResolvedPlan:
    """Return the plan chosen for cards on which every block takes equally long; two equal cards if `free` is one number."""
    each = (free, free) if isinstance(free, float) else free
    times = BlockTimes(((1.0, 1.0),) * 2, (FLUX.double_blocks, FLUX.single_blocks))
    return planner.choose(asked, lambda plan: each, lambda plan: CARD, lambda plan: times).choice.plan


gpu_plan = functools.partial(plans.gpu_plan, blocks=57)


def test_flux_in_bf16_fits_a_whole_card_of_24_gb_and_is_streamed_to_one_that_is_in_use():
    assert choose(Planner(), TOTAL, question()).ulysses == 2
    planner = Planner()
    plan = choose(planner, TOTAL - TAKEN, question(ulysses=2))
    assert (plan.degrees, plan.weights) == ("ulysses 2", "streamed")
    assert planner.latest is not None
    assert re.search(
        r"because replicated weights do not fit \(24\.\d\d GB needed, 23\.90 GB usable\)\.$", planner.latest.choice.why
    )
    assert (
        choose(Planner(), TOTAL - TAKEN, question(pipefusion=0)).pipefusion == 2
    )  # the preset slow links needs no streaming
    with pytest.raises(Refused, match=r"needs 24\.\d\d GB .* and each has 2\.00 GB free"):
        choose(Planner(), 2e9, question())


def test_the_same_plan_is_logged_once(caplog):
    caplog.set_level(logging.INFO)
    planner, asked = Planner(), question()
    needed = cost(gpu_plan(ulysses=2), FLUX, JOB, measured_profile(CARD, (TOTAL,), gpus=True)).memory
    plan = choose(planner, needed, asked)
    caplog.clear()
    assert choose(planner, needed - 0.9 * SLACK, asked) == plan  # the first run has loaded kernels
    assert not caplog.text
    assert choose(planner, 30e9, asked) == plan  # now one GPU would be enough, which is logged
    caplog.clear()
    assert choose(planner, 80e9, asked) == plan
    assert not caplog.text


def test_free_memory_is_asked_for_each_time_and_a_memory_limit_is_obeyed():
    planner, asked = Planner(), question()
    held = [choose(planner, free, asked).weights for free in (TOTAL, TOTAL - TAKEN, TOTAL)]
    assert held == ["replicated", "streamed", "replicated"]
    assert choose(Planner(), TOTAL, question(memory_limit=20.0)).weights == "streamed"
    with pytest.raises(Refused, match=r"each may use 2\.00 GB \(memory_limit 2\)"):
        choose(Planner(), TOTAL, question(memory_limit=2.0))


def test_communicators_take_memory_for_each_pair_of_gpus():
    assert connections(gpu_plan(ulysses=8)) == 7  # the axis is also the sequence
    assert connections(gpu_plan(ring=2, ulysses=4)) == 1 + 3 + 7
    assert connections(gpu_plan(pipefusion=4, cfg=2)) == 3 + 3 + 1  # both directions, and the other branch
    assert connections(cpu_plan(ulysses=8)) == rows_connections(cpu_plan(ulysses=8)) == 0
    assert rows_connections(gpu_plan(ring=2, ulysses=4)) == 7  # a decode then finds memory for its own
    profile = measured_profile(CARD, (TOTAL,), gpus=True)
    free = measured_profile(msgspec.structs.replace(CARD, connection=0.0), (TOTAL,), gpus=True)
    plan = gpu_plan(ulysses=8)
    assert cost(plan, FLUX, JOB, profile).memory - cost(plan, FLUX, JOB, free).memory == pytest.approx((7 + 7) * 3e7)
    assert free.device.context == KERNEL_BYTES


def on(plan: ResolvedPlan, free: tuple[float, ...], model: ModelShape = FLUX, job: DenoiseJob = JOB) -> StepCost:
    return cost(plan, model, job, measured_profile(CARD, free, gpus=True))


def test_each_rank_is_judged_by_its_own_need_and_free_memory():
    uneven = msgspec.structs.replace(gpu_plan(pipefusion=2), stages=(40, 17))
    needed = on(uneven, (TOTAL, TOTAL)).needed
    assert needed[0] > 2 * needed[1]
    enough = (needed[0] + 1, needed[1] + 1)  # the second rank has less than the first one needs
    assert on(uneven, enough).fits and not on(uneven, enough[::-1]).fits
    short = on(uneven, (needed[0] + 5e9, needed[1] - 1e9))
    assert (short.tightest, short.memory, short.allowance, short.fits) == (1, needed[1], needed[1] - 1e9, False)


def test_blocks_are_cut_by_the_free_memory_of_each_card():
    asked = question(pipefusion=2)
    even = choose(Planner(), (TOTAL, TOTAL), asked).stages
    assert sorted(even) == [28, 29]
    for free in ((16e9, 24e9), (24e9, 10e9)):
        assert not on(msgspec.structs.replace(gpu_plan(pipefusion=2), stages=even), free).fits
        plan = choose(Planner(), free, asked)
        assert on(plan, free).fits
        assert (plan.stages[0] > even[0]) == (free[0] > free[1])


def test_a_refusal_names_the_card_that_lacks_most_and_suggests_a_plan_cut_by_free_memory():
    with pytest.raises(Refused, match=r"pipefusion 2, needs 1\d\.\d\d GB on cuda:1 .* cuda:1 has 8\.00 GB free"):
        choose(Planner(), (12e9, 8e9), question(pipefusion=2))
    suggested = r"needs 1\d\.\d\d GB on cuda:0 .* cuda:0 has 10\.00 GB free: use pipefusion 2, which"
    with pytest.raises(Refused, match=suggested):
        choose(Planner(), (10e9, 24e9), question(weights="sharded"))


def test_a_card_that_lacks_memory_gets_fewer_tokens():
    wan = known_model("wan2.2-14b").shape
    job = DenoiseJob(image_tokens=75_600, text_tokens=512, weight_element=1)
    even = msgspec.structs.replace(gpu_plan(ulysses=2), stages=(40,))
    needed = on(even, (TOTAL, TOTAL), wan, job).needed[0]
    free = (needed + 2e9, needed - 1e9)

    def shared(free: tuple[float, ...]) -> ResolvedPlan:
        return share_by_memory(even, wan, job, measured_profile(CARD, free, gpus=True))

    plan = shared(free)
    assert plan.shares[0] > plan.shares[1] and on(plan, free, wan, job).fits
    assert shared((needed, needed)) == even  # both have enough memory
    assert shared((needed - 1, needed - 1)) == even  # no card has spare memory
    assert shared((needed + 9e9, needed - 9e9)) == even  # the weights alone are too large


def test_compiled_blocks_are_predicted_to_be_faster():
    def no_stages(plan: ResolvedPlan) -> BlockTimes:
        raise AssertionError(plan)

    def machine(compiler: str) -> Profile:
        return measured_profile(CARD, (TOTAL,) * 2, gpus=True, compiler=compiler)

    eager, inductor, cudagraphs = (
        cost(gpu_plan(ulysses=2), FLUX, JOB, machine(compiler)) for compiler in ("", "inductor", "cudagraphs")
    )
    assert inductor.device < eager.device and inductor.ulysses == eager.ulysses and cudagraphs == eager
    slow, fast = (
        Planner().choose(replace(question(), compiler=name), lambda _: (TOTAL,) * 2, lambda _: CARD, no_stages).choice
        for name in ("", "inductor")
    )
    assert fast.single.seconds < 0.95 * slow.single.seconds


def test_expanding_weights_costs_their_bytes_in_every_pass_and_patch():
    plan, patched = gpu_plan(ulysses=2), gpu_plan(ulysses=2, patches=4)
    expanded = replace(JOB, weight_element=1, expansion=3)
    each = 3 * FLUX.weights(0, 57) / CARD.bandwidth
    for way, passes in ((plan, 1), (patched, 4 * (1 - 1 / JOB.steps))):
        whole, more = (on(way, (TOTAL, TOTAL), job=job).device for job in (JOB, expanded))
        assert more - whole == pytest.approx(passes * each)


def test_a_model_that_couples_rows_takes_one_of_the_automatic_devices():
    """A plan for named devices is refused, because the devices are the user's choice."""
    shape = unsharded_shape("Whole", 10**9, 4)
    whole = replace(question(), shape=shape, workload=Workload(1, True, 1), job=DenoiseJob(64, 8, has_uncond=True))
    measured: list[int] = []

    def times(plan: ResolvedPlan) -> BlockTimes:
        measured.append(plan.world_size)
        if plan.world_size > 1:
            raise Refused("its rows meet")
        return BlockTimes(((1.0, 2.0),), (1, 2), together=True)

    def chosen(planner: Planner, asked: PlanRequest) -> ResolvedPlan:
        free = lambda plan: (TOTAL,) * plan.world_size  # noqa: E731
        machine = lambda plan: msgspec.structs.replace(CARD, kinds=CARD.kinds[: plan.world_size])  # noqa: E731
        return planner.choose(asked, free, machine, times).choice.plan

    planner = Planner()
    for _ in range(2):
        assert chosen(planner, whole).devices == ("cuda:0",)
    assert measured == [2, 1]
    assert planner.couples_rows(whole.spec)
    with pytest.raises(Refused, match="its rows meet"):
        chosen(Planner(), replace(whole, requested_plan=ParallelPlan(devices="0,1")))
