"""The automatic choice of a plan, by the cost model and what the workers measured of this machine."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from ..models.family import ModelSpec
from ..plan import ModelShape, ParallelPlan, ResolvedPlan, Workload, candidates, feasible
from ..plan.choose import Choice, best, table
from ..plan.cost import Job
from ..plan.measure import BlockTimes, Machine, measured_profile
from ..plan.stages import cut_by_time

GIGABYTE = 1e9

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Question:
    """What a plan is wanted for, on a machine that shows `gpus` GPUs."""

    wish: ParallelPlan
    gpus: int
    spec: ModelSpec
    shape: ModelShape
    workload: Workload
    job: Job


class Planner:
    """Answers each question once and logs the ranking it chose from."""

    def __init__(self) -> None:
        self._answers: dict[Question, ResolvedPlan] = {}

    def choose(
        self,
        question: Question,
        measure_machine: Callable[[ResolvedPlan], Machine],
        measure_blocks: Callable[[ResolvedPlan], BlockTimes],
    ) -> ResolvedPlan:
        """The fastest plan that does what is asked for and fits into memory.

        Args:
            measure_machine: what the workers on a plan's devices measure.
            measure_blocks: what they measure of the model's blocks; asked for plans with stages.

        Raises:
            Refused: no plan can work; the sentence names one that does, or what to change.
        """
        if question not in self._answers:
            wish, shape, job = question.wish, question.shape, question.job
            found = feasible(wish, question.gpus, shape.limits, question.workload)
            machine = measure_machine(found[0])
            if not wish.stages:
                found = [_cut(plan, measure_blocks) for plan in found]
            stale = wish.pipefusion > 1 or wish.patches > 1
            sharers = max(found[0].devices.count(device) for device in found[0].devices)
            limit = min(machine.memory, wish.memory_limit * GIGABYTE / sharers or machine.memory)
            choice = best(found, shape, job, measured_profile(machine), limit, stale, _leaner(question))
            self._tell(question, choice, limit)
            self._answers[question] = choice.plan
        return self._answers[question]

    @staticmethod
    def _tell(question: Question, choice: Choice, memory_limit: float) -> None:
        job = question.job
        log.info(
            "Parallel: plans for %d image and %d text tokens, batch %d, by this machine's measured speed\n%s\nChosen: %s. %s",
            job.image_tokens,
            job.text_tokens,
            job.batch,
            table(choice.ranking, memory_limit, choice.plan),
            choice.plan.describe(),
            choice.why,
        )
        if choice.better_alone:
            log.warning(
                "Parallel: one device alone is faster for this job: write %s into devices of Parallel Plan.",
                choice.single.plan.devices[0].removeprefix("cuda:"),
            )


def _cut(plan: ResolvedPlan, measure_blocks: Callable[[ResolvedPlan], BlockTimes]) -> ResolvedPlan:
    """The plan with its stages cut by the time that blocks take."""
    if plan.pipefusion in (1, sum(plan.stages)):
        return plan
    return msgspec.structs.replace(plan, stages=cut_by_time(plan, measure_blocks(plan)))


def _leaner(question: Question) -> list[ResolvedPlan]:
    """Plans on the same devices that hold less on each."""
    free = ParallelPlan(devices=question.wish.devices, attention=question.wish.attention, data=0)
    wishes = [msgspec.structs.replace(free, pipefusion=0), msgspec.structs.replace(free, weights="sharded")]
    limits, workload = question.shape.limits, question.workload
    return [plan for wish in wishes for plan in candidates(wish, question.gpus, limits, workload)]
