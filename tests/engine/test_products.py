"""Every product of parallel forms gives the result of one rank; PipeFusion's result follows its rule."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import msgspec
import psutil
import pytest
import torch

from parallel_backend.denoise.program import ModelEvaluation, Program, encoded
from parallel_backend.errors import Cancelled, Refused
from parallel_backend.plan import ModelLimits, ParallelPlan, ResolvedPlan, Workload, candidates
from tests.engine.conftest import TOLERANCE, Job, Runner, Simulated, sigmas
from tests.support.latents import relative_error
from tests.support.plans import cpu_plan
from tests.support.selection import thorough

STEPS = 3


def job_of(models: dict[int, Path], heads: int, **settings: object) -> Job:
    """Return a denoise with odd token counts: a latent of 17 x 5, texts of 21 and 8 tokens."""
    return Job(models[heads], sigmas(STEPS), height=17, width=5, text=(21, 8), **settings)  # type: ignore[arg-type]


def heads_for(plan: ResolvedPlan) -> int:
    """Return the heads of the narrowest model for a plan. Ranks with unequal shares also have unequal numbers of heads."""
    return 2 if plan.ulysses <= 2 and len({*plan.shares}) == 1 else 4


def products(workers: int, heads: int, **requested_plan: object) -> list[ResolvedPlan]:
    """Return all factorisations of a number of workers over cfg, pipefusion, ring and ulysses."""
    plan = ParallelPlan(devices=f"cpu:{workers}", pipefusion=0, **requested_plan)  # type: ignore[arg-type]
    return candidates(plan, 0, ModelLimits(heads, 128, blocks=3), Workload(batch=1, has_uncond=True, token_rows=8))


def name_of(plan: ResolvedPlan) -> str:
    """Return the plan in words, without its devices."""
    return plan.describe().split(": ")[-1]


def _is_quick(workers: int, heads: int, plan: ResolvedPlan) -> bool:
    """Return True for uneven heads, where a plan allows them, on three and four workers, without stages of two blocks.

    The quick run has such stages, and eight workers, in test_pipefusion_follows_its_rule_exactly. It has two workers, and four
    heads, in test_pipefusions_result_depends_only_on_patches_and_warm_up.
    """
    return (heads == 3 or plan.ulysses > 3) and 2 < workers <= 4 and plan.pipefusion != 2


@pytest.mark.parametrize(
    ("heads", "plan"),
    [
        pytest.param(
            heads, plan, marks=[thorough] * (not _is_quick(workers, heads, plan)), id=f"{heads} heads, {plan.degrees}"
        )
        for workers in (2, 3, 4, 6, 8)
        for heads in (3, 4)
        for plan in products(workers, heads, warmup_steps=STEPS)
    ],
)
def test_every_product_is_exact_when_warm_up_covers_all_steps(
    run: Runner, models: dict[int, Path], simulated: Simulated, heads: int, plan: ResolvedPlan
) -> None:
    job = dataclasses.replace(job_of(models, heads), sigmas=sigmas(2))
    assert relative_error(run(job, plan), simulated(job)) <= TOLERANCE


@pytest.mark.parametrize("sampler", [pytest.param("euler", marks=thorough), "dpmpp_2m_sde"])
@pytest.mark.parametrize("batch", [pytest.param(2, marks=thorough), 3])
def test_a_batch_divided_over_groups_returns_in_order(
    run: Runner, models: dict[int, Path], simulated: Simulated, batch: int, sampler: str
) -> None:
    """A stochastic sampler gives each item its own noise, so that it also has the order of the noise."""
    job = job_of(models, 2, batch=batch, sampler=sampler)
    assert relative_error(run(job, cpu_plan(data=2, ulysses=2)), simulated(job)) <= TOLERANCE


PIPED = [
    cpu_plan(pipefusion=2, patches=2),
    cpu_plan(pipefusion=2, patches=3),
    cpu_plan(cfg=2, pipefusion=2, patches=4),
    cpu_plan(pipefusion=2, ring=2, patches=4),
    cpu_plan(pipefusion=2, ulysses=2, patches=3),
    cpu_plan(pipefusion=2, ring=2, ulysses=2, patches=4),
    cpu_plan(cfg=2, pipefusion=2, ring=2, patches=3),
    cpu_plan(pipefusion=2, ulysses=2, patches=3, shares=(100, 37)),
]


SAMPLERS = ("euler", "heun", "dpmpp_2m_sde")
COVERED = (1, 3, 4, 6)
"""Places of plans whose axes other plans of the list have, or the quick run's in test_references_go_with_the_first_patch."""


@pytest.mark.parametrize(
    ("plan", "sampler"),
    [
        pytest.param(
            plan,
            sampler,
            id=f"{name_of(plan)}-{sampler}",
            marks=[thorough] * (place in COVERED or sampler != SAMPLERS[place % len(SAMPLERS)]),
        )
        for place, plan in enumerate(PIPED)
        for sampler in SAMPLERS
    ],
)
def test_pipefusion_follows_its_rule_exactly(
    run: Runner, models: dict[int, Path], simulated: Simulated, plan: ResolvedPlan, sampler: str
) -> None:
    job = job_of(models, heads_for(plan), sampler=sampler)
    result = run(job, plan)
    assert relative_error(result, simulated(job, plan.patches, plan.warmup_steps)) <= TOLERANCE
    assert relative_error(result, simulated(job)) > 10 * TOLERANCE  # the patches are stale


@pytest.mark.parametrize(
    "plan",
    [  # the quick run has one rank, and both stages and ranks that share the reference's tokens
        cpu_plan(patches=2),
        pytest.param(PIPED[0], marks=thorough),
        pytest.param(cpu_plan(pipefusion=2, ulysses=2, patches=2), marks=thorough),
        PIPED[3],
    ],
    ids=name_of,
)
def test_references_go_with_the_first_patch(
    run: Runner, models: dict[int, Path], simulated: Simulated, plan: ResolvedPlan
) -> None:
    job = job_of(models, 2, references=((6, 10), (7, 5)))
    result = run(job, plan)
    assert relative_error(result, simulated(job, plan.patches, plan.warmup_steps)) <= TOLERANCE
    assert relative_error(result, simulated(job)) > 10 * TOLERANCE  # the patches are stale
    assert relative_error(result, simulated(job_of(models, 2), plan.patches)) > 10 * TOLERANCE


DETERMINED = [(patches, warmup) for patches in (2, 3, 4, 7) for warmup in (1, 2)]
ALONE, OF_2, OF_4, OF_8 = (
    {f"{workers} workers, {plan.degrees}": plan for plan in products(workers, 4)} for workers in (1, 2, 4, 8)
)
QUICK_DETERMINED = dict(zip([*ALONE, *OF_2], [(2, 1), (2, 2), (3, 1), (4, 1), (7, 1)], strict=True))
"""Numbers of patches and warm-up steps that the quick run has under each plan.

The quick run has products of four and eight ranks in test_pipefusion_follows_its_rule_exactly.
"""


@pytest.mark.parametrize(
    ("plan", "determined"),
    [
        pytest.param(plan, each, id=f"{name}-{each}", marks=[thorough] * (each != QUICK_DETERMINED.get(name)))
        for name, plan in (ALONE | OF_2 | OF_4 | OF_8).items()
        for each in DETERMINED
    ],
)
def test_pipefusions_result_depends_only_on_patches_and_warm_up(
    run: Runner, models: dict[int, Path], simulated: Simulated, plan: ResolvedPlan, determined: tuple[int, int]
) -> None:
    job, (patches, warmup) = job_of(models, heads_for(plan)), determined
    result = run(job, msgspec.structs.replace(plan, patches=patches, warmup_steps=warmup))
    assert relative_error(result, simulated(job, patches, warmup)) <= TOLERANCE


@pytest.mark.parametrize(
    "plan",
    [
        # Equal bits without patches are also in engine/test_streamed, under Ulysses.
        pytest.param(plan, id=name, marks=[thorough] * (plan.degrees != "pipefusion 2"))
        for name, plan in (OF_2 | OF_4 | OF_8).items()
    ],
)
def test_the_same_job_gives_the_same_bits(run: Runner, models: dict[int, Path], plan: ResolvedPlan) -> None:
    plan = msgspec.structs.replace(plan, patches=7, warmup_steps=2)
    job = job_of(models, heads_for(plan))
    assert torch.equal(run(job, plan), run(job, plan))


@pytest.mark.parametrize("plan", [cpu_plan(pipefusion=2, ulysses=2, patches=2)], ids=["4 workers"])
def test_other_patches_and_warm_up_use_the_same_connections(
    run: Runner, models: dict[int, Path], plan: ResolvedPlan
) -> None:
    def connections() -> set[object]:
        processes = [psutil.Process(pid) for pid in run.workers()]
        return {(c.laddr, c.raddr) for process in processes for c in process.net_connections("inet")}

    job = job_of(models, 2)
    run(job, plan)
    before = connections()
    run(job, msgspec.structs.replace(plan, patches=3, warmup_steps=2))
    assert connections() == before
    run(job, cpu_plan(pipefusion=2, ring=2, patches=3, warmup_steps=2))
    assert connections() != before


@pytest.mark.parametrize(
    "plan",
    [cpu_plan(pipefusion=2, patches=3), pytest.param(cpu_plan(pipefusion=2, ring=2, patches=4), marks=thorough)],
)
def test_a_run_after_a_cancel_while_patches_stream_is_exact(
    run: Runner, models: dict[int, Path], simulated: Simulated, plan: ResolvedPlan
) -> None:
    long = Job(models[2], sigmas(300), height=17, width=5, text=(21, 8))
    with pytest.raises(Cancelled):
        run(long, plan, cancel_at=3)
    job = job_of(models, 2)
    assert relative_error(run(job, plan), simulated(job, plan.patches)) <= TOLERANCE


@pytest.mark.parametrize("workers", [2])
def test_a_malformed_sampler_program_is_refused_and_the_workers_stay(
    run: Runner, models: dict[int, Path], workers: int
) -> None:
    job, plan = job_of(models, 2), cpu_plan(ulysses=workers)
    expected = run(job, plan)
    before = run.workers()
    bad = encoded(Program("bad", (ModelEvaluation(5, 1.0),), 0))
    with pytest.raises(
        Refused, match=r"the program of the sampler bad is not well-formed \(entry 0: unknown value 5\)"
    ):
        run(job, plan, replaced={"program": bad})
    assert torch.equal(run(job, plan), expected)
    assert run.workers() == before


@pytest.mark.parametrize(
    "plan",
    [cpu_plan(cfg=2, pipefusion=2, patches=3), pytest.param(cpu_plan(cfg=2, ulysses=2, patches=3), marks=thorough)],
)
def test_a_prompt_that_ends_early_on_one_side_gives_the_result_of_one_rank(
    run: Runner, models: dict[int, Path], plan: ResolvedPlan
) -> None:
    job = job_of(models, 2, positive_ends=0.4)
    result, never = run(job, plan), run(job_of(models, 2), plan)
    assert relative_error(result, run(job, cpu_plan(patches=3))) <= TOLERANCE
    assert relative_error(result, never) > 10 * TOLERANCE


@pytest.mark.parametrize(
    ("plan", "senders"),
    [
        pytest.param(cpu_plan(cfg=2), [0, 1], id="cfg 2"),
        pytest.param(cpu_plan(cfg=2, pipefusion=2), [1, 3], id="cfg 2, pipefusion 2"),
        # "cfg 2" and "cfg 2, pipefusion 2" show that only one half sends, and that only the last ranks of a half do.
        pytest.param(cpu_plan(data=2, cfg=2), [1, 3], id="data 2, cfg 2", marks=thorough),
        # test_rows_of_a_call_that_change_one_another_stay_on_one_rank has a call that no rank sends
        pytest.param(cpu_plan(ulysses=2), [], id="ulysses 2", marks=thorough),
    ],
)
def test_calls_of_both_prompts_run_on_two_halves_of_the_ranks(
    run: Runner, models: dict[int, Path], plan: ResolvedPlan, senders: list[int]
) -> None:
    """Half of the ranks compute each call, and send the other half only the output."""
    job = job_of(models, 2)
    calls = [
        {"x": job.noise, "timestep": torch.ones(job.batch), "context": context, "y": pooled}
        for context, pooled in job.prompts
    ]
    apart = [run.forward("comfyui", job.path, [call], cpu_plan()) for call in calls]
    together = run.forward("comfyui", job.path, calls, plan)
    assert relative_error(together, torch.cat(apart)) <= TOLERANCE
    assert run.answer is not None
    sent = {report.rank: report.sent.get("cfg", 0) for report in run.answer.reports}
    assert sent == {rank: job.noise.nbytes if rank in senders else 0 for rank in sent}


# test_calls_of_both_prompts_run_on_two_halves_of_the_ranks has parts of a call that ranks compute apart.
@pytest.mark.parametrize("couples_rows", [pytest.param(False, marks=thorough), True])
def test_rows_of_a_call_that_change_one_another_stay_on_one_rank(
    run: Runner, models: dict[int, Path], couples_rows: bool
) -> None:
    """The ranks of cfg 2 compute a row each and exchange the outputs, or each computes the whole call."""
    job = job_of(models, 2)
    context, pooled = (torch.cat([tensor, -tensor]) for tensor in job.prompts[0])
    noise = torch.cat([job.noise] * 2)
    call = {"x": noise, "timestep": torch.ones(2 * job.batch), "context": context, "y": pooled}
    expected = run.forward("comfyui", job.path, [call], cpu_plan())
    out = run.forward("comfyui", job.path, [call], cpu_plan(cfg=2), couples_rows=couples_rows)
    assert relative_error(out, expected) <= TOLERANCE
    assert run.answer is not None
    sent = {report.sent.get("cfg", 0) for report in run.answer.reports}
    assert sent == {0 if couples_rows else job.noise.nbytes}
