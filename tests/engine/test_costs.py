"""Counted costs of a run: bytes sent against the formulas, bytes of weights and caches, and no drain between steps."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file

from parallel_backend.layout import SequenceSplit
from parallel_backend.plan import ResolvedPlan
from parallel_backend.wire.to_host import RankCostReply
from tests.engine.conftest import Job, Runner, sigmas
from tests.support.plans import cpu_plan
from tests.support.selection import thorough
from tests.support.tiny.flux import HEAD_DIM, save_flux

STEPS, HEADS, ELEMENT = 3, 4, 4
BLOCKS = ("double_blocks.0.", "single_blocks.0.", "single_blocks.1.")
HIDDEN = HEADS * HEAD_DIM
TEXT, ROWS = 16, 8
IMAGE = ROWS * ROWS
BATCH = 2  # the positive and the negative prompt, in one forward
TOKENS = BATCH * (TEXT + IMAGE)


def even_job(models: dict[int, Path]) -> Job:
    """Return a job whose token counts are divisible by every degree, as the formulas assume."""
    return Job(models[HEADS], sigmas(STEPS), height=2 * ROWS, width=2 * ROWS, text=(TEXT, TEXT))


def nbytes(models: dict[int, Path], *names: str) -> int:
    """Return the bytes of the tensors of the job's model whose names begin so."""
    return sum(tensor.nbytes for name, tensor in load_file(models[HEADS]).items() if name.startswith(names))


def reports(run: Runner, job: Job, plan: ResolvedPlan) -> list[RankCostReply]:
    """Return each rank's report, in rank order."""
    run(job, plan)
    assert run.answer is not None
    assert len(run.answer.reports) == plan.world_size
    return sorted(run.answer.reports, key=lambda report: report.rank)


Reported = Callable[[ResolvedPlan], list[RankCostReply]]


@pytest.fixture(scope="module")
def reported(run: Runner, models: dict[int, Path]) -> Reported:
    """Return a function that gives the reports of the even job under a plan. It runs each plan once."""
    return functools.cache(lambda plan: reports(run, even_job(models), plan))


SEQUENCE = [
    pytest.param(cpu_plan(ring=ring, ulysses=ulysses), marks=[thorough] * (ring != ulysses))
    for ring, ulysses in ((2, 2), (1, 2), (2, 1), (1, 4), (4, 1), (2, 4), (4, 2))
]
"""The quick run has as many Ulysses ranks as Ring ranks."""


@pytest.mark.parametrize("plan", SEQUENCE, ids=lambda plan: plan.degrees)
def test_ulysses_and_ring_send_the_bytes_of_their_formulas(reported: Reported, plan: ResolvedPlan) -> None:
    ranks = plan.ring * plan.ulysses
    share = TOKENS * HIDDEN / ranks * len(BLOCKS) * ELEMENT * STEPS
    for report in reported(plan):
        assert report.sent.get("ulysses", 0) == pytest.approx(4 * (plan.ulysses - 1) / plan.ulysses * share, rel=0.01)
        assert report.sent.get("ring", 0) == pytest.approx(2 * (plan.ring - 1) * share, rel=0.01)
        output = BATCH * IMAGE // ranks * 4 * 16 * ELEMENT * STEPS
        assert report.sent["sequence"] == (ranks - 1) * output  # beyond the formulas: the model's output, gathered
        assert set(report.sent) <= {"ulysses", "ring", "sequence"}


@pytest.mark.parametrize("shares", [pytest.param((1, 1, 1, 1), marks=thorough), (100, 60, 40, 20)], ids=str)
def test_uneven_tokens_and_heads_send_exactly_the_counted_bytes(
    run: Runner, models: dict[int, Path], shares: tuple[int, ...]
) -> None:
    job = Job(models[3], sigmas(STEPS), height=17, width=13, text=(21, 21))
    plan = cpu_plan(ring=2, ulysses=2, shares=shares)
    split = SequenceSplit.of((21, 9 * 7), 3, plan.ring, plan.ulysses, plan.shares)
    heads = split.head_counts()
    for report in reports(run, job, plan):
        ring_rank, ulysses_rank = divmod(report.rank, plan.ulysses)
        local, group = split.tokens[report.rank], split.ring_tokens()[ring_rank]
        there = 3 * local * (3 - heads[ulysses_rank]) + (group - local) * heads[ulysses_rank]
        per_token = BATCH * HEAD_DIM * ELEMENT * len(BLOCKS) * STEPS
        assert report.sent["ulysses"] == there * per_token
        assert report.sent["ring"] == 2 * group * heads[ulysses_rank] * per_token


PIPES = [
    cpu_plan(pipefusion=2, patches=2),
    pytest.param(cpu_plan(pipefusion=3, patches=4), marks=thorough),
    cpu_plan(pipefusion=2, ring=2, patches=2),
    pytest.param(cpu_plan(pipefusion=2, ring=2, ulysses=2, patches=4), marks=thorough),
    # engine/test_products has the bytes of cfg 2 with stages
    pytest.param(cpu_plan(cfg=2, pipefusion=2, ring=2, patches=2), marks=thorough),
]


@pytest.mark.parametrize("plan", PIPES, ids=lambda plan: f"{plan.degrees}, {plan.patches} patches")
def test_pipefusion_and_cfg_send_and_hold_the_bytes_of_their_formulas(
    reported: Reported, models: dict[int, Path], plan: ResolvedPlan
) -> None:
    """A stage holds its blocks and the named shared parts. The cache of keys and values is split, and nothing is replicated."""
    latent = even_job(models).noise.nbytes
    shared, exit_ = nbytes(models, "time_in", "vector_in", "img_in", "txt_in"), nbytes(models, "final_layer")
    ranks = plan.ring * plan.ulysses
    share = TOKENS / plan.cfg * HIDDEN / ranks * ELEMENT * STEPS
    for report in reported(plan):
        stage = report.rank // ranks % plan.pipefusion
        blocks, start = plan.stages[stage], sum(plan.stages[:stage])
        first, last = stage == 0, stage == plan.pipefusion - 1
        sent = report.sent
        assert sent.get("pipefusion", 0) == pytest.approx(0 if last else share, rel=0.01)
        assert sent.get("ulysses", 0) == pytest.approx(4 * (plan.ulysses - 1) / plan.ulysses * share * blocks, rel=0.01)
        assert sent.get("ring", 0) == pytest.approx(2 * (plan.ring - 1) * share * blocks, rel=0.01)
        assert sent.get("cfg", 0) == (latent * STEPS if last and plan.cfg == 2 else 0)
        # beyond the formulas, itemised: updated latents back to the first stage, control words, log-sum-exps
        assert sent.get("latents", 0) == (latent * (STEPS - 1) if last else 0)
        assert sent.get("control", 0) == (0 if last else STEPS - 1)
        stage_ranks = plan.cfg * ranks
        assert sent.get("stage", 0) == ((stage_ranks - 1) * ELEMENT * (STEPS - 1) if first else 0)
        patch_calls = STEPS - plan.warmup_steps
        lse = (plan.ring - 1) * TOKENS / plan.cfg / ranks * HEADS * ELEMENT * blocks * patch_calls
        assert sent.get("ring lse", 0) == pytest.approx(lse, rel=0.01)
        own = nbytes(models, *BLOCKS[start : start + blocks])
        assert report.weights == own + shared + (exit_ if last else 0)
        assert report.cache == 2 * TOKENS / plan.cfg * HIDDEN * ELEMENT * blocks / ranks


@pytest.mark.parametrize("workers", [2, pytest.param(4, marks=thorough)])
def test_sharded_weights_are_one_nth_of_the_blocks_and_the_named_shared_parts(
    reported: Reported, models: dict[int, Path], workers: int
) -> None:
    blocks = nbytes(models, *BLOCKS)
    shared = nbytes(models, "") - blocks
    plan = cpu_plan(ulysses=workers, weights="sharded")
    for report in reported(plan):
        assert report.weights - shared == pytest.approx(blocks / workers, rel=0.05)
        assert report.sent["weights"] == pytest.approx((workers - 1) * blocks / workers * STEPS, rel=0.05)


def test_the_pipeline_does_not_drain_between_steps(
    run: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stages = patches = 4
    steps, warmup = 5, 1
    path = save_flux(tmp_path / "4-blocks.safetensors", heads=2, single_blocks=3)
    monkeypatch.setenv("PARALLEL_TRACE", str(tmp_path))
    run.end_workers()  # the next ones are told to write a trace
    job = Job(path, sigmas(steps), cfg=1.0, height=64, width=64)  # large enough to outlast the system's scheduling
    run(job, cpu_plan(pipefusion=stages, patches=patches, warmup_steps=warmup, blocks=4))
    run.end_workers()
    spans = [stage_spans(tmp_path / f"trace-rank{rank}.json") for rank in range(stages)]
    order = [(call, patch) for call in range(warmup, steps) for patch in range(patches)]
    for stage in spans:
        assert [key for key in stage if key[1] >= 0] == order
    # One overlap is enough: a stage that waits for the end of a call has none, and a busy machine may prevent some.
    begins = [spans[0][call + 1, 0][0] for call in range(warmup, steps - 1)]
    ends = [spans[-1][call, patches - 1][1] for call in range(warmup, steps - 1)]
    assert any(begin < end for begin, end in zip(begins, ends, strict=True)), (
        "the first stage waited for each call's end"
    )


Spans = dict[tuple[int, int], tuple[float, float]]


def stage_spans(file: Path) -> Spans:
    """Return for each (call, patch) its begin and end, in the order of the events."""
    events = [event for event in json.loads(file.read_text())["traceEvents"] if event["name"] == "stage"]
    return {(e["args"]["call"], e["args"]["patch"]): (e["ts"], e["ts"] + e["dur"]) for e in events}
