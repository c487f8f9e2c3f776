"""The automatic choice of a plan, by the cost model and the workers' measurements of this machine."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import msgspec

from ...attention.kernels import describe
from ...diffusion import ModelSpec
from ...errors import Refused
from ...plan import ModelShape, ParallelPlan, ResolvedPlan, Workload, candidates, feasible
from ...plan.choose import PlanChoice, best, streamed, table
from ...plan.devices import AUTOMATIC_AMONG
from ...plan.predict.measure import BlockTimes, Machine, measured_profile
from ...plan.predict.memory import lacking
from ...plan.predict.profiles import DenoiseJob, ForwardTime, Profile
from ...plan.resolve import is_automatic
from ...plan.split import cut_by_time, forward_times, paces_by, share_batch, share_by, share_by_memory

GIGABYTE = 1e9

SLACK = 0.5e9
"""Bytes by which free memory may change, as kernels are loaded, before a plan is chosen anew."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PlanRequest:
    """A request for a plan.

    Attributes:
        gpus: number of GPUs of the machine.
        compiler: torch.compile's backend, with which the workers compile blocks; empty for no compilation.
        alone: True if no plan divides the rows that ComfyUI puts into one call.
    """

    requested_plan: ParallelPlan
    gpus: int
    spec: ModelSpec
    shape: ModelShape
    workload: Workload
    job: DenoiseJob
    compiler: str = ""
    alone: bool = False


@dataclass(frozen=True)
class MeasuredChoice:
    """A choice, and the bytes that were free to each worker then."""

    choice: PlanChoice
    memory: tuple[float, ...]

    def holds(self, memory: Sequence[float]) -> bool:
        """Return True if the choice would be the same with this memory."""
        little = all(abs(now - then) < SLACK for now, then in zip(memory, self.memory, strict=True))
        return little or _fitting(self.choice, memory) == _fitting(self.choice, self.memory)


class Planner:
    """The chooser of plans. It answers each request once for the free memory, and logs the ranking that it chose from."""

    def __init__(self) -> None:
        self._answers: dict[PlanRequest, MeasuredChoice] = {}
        self._together: set[ModelSpec] = set()
        self.latest: MeasuredChoice | None = None
        """Answer to the last request."""

    def couples_rows(self, spec: ModelSpec) -> bool:
        """Return True if a model looks at all rows of a batch, as was found when it was planned for.

        Only one device can run the model then, and only with the rows that ComfyUI puts into a call.
        """
        return spec in self._together

    def forget(self) -> None:
        """Forget all answers, because the machine is measured anew."""
        self._answers.clear()

    def choose(
        self,
        question: PlanRequest,
        measure_memory: Callable[[ResolvedPlan], Sequence[float]],
        measure_machine: Callable[[ResolvedPlan], Machine],
        measure_blocks: Callable[[ResolvedPlan], BlockTimes],
    ) -> MeasuredChoice:
        """Return the fastest plan that meets the request and fits into memory, with the candidates that it was chosen from.

        Args:
            measure_memory: returns the bytes that a job may use now on each rank's device of a plan.
            measure_machine: returns the speeds that the workers on a plan's devices measure.
            measure_blocks: returns the times of the model's blocks there. Called for plans with stages, for models that run
                unsharded, and if devices are of several kinds.

        Raises:
            Refused: no plan can work. The message names one that does, or says what to change.
        """
        if question.spec in self._together and not question.alone:
            question = _on_one_device(question) or question
        requested_plan, shape, job = question.requested_plan, question.shape, question.job
        candidates = feasible(requested_plan, question.gpus, shape.limits, question.workload)
        devices = candidates[0].devices
        memory = tuple(measure_memory(candidates[0]))
        if requested_plan.memory_limit:
            allowed = (requested_plan.memory_limit * GIGABYTE / devices.count(device) for device in devices)
            memory = tuple(map(min, memory, allowed))
        answer = self._answers.get(question)
        if answer is None or not answer.holds(memory):
            machine = measure_machine(candidates[0])
            alternatives = _leaner(question)
            paces: tuple[float, ...] = ()
            forwards: tuple[ForwardTime, ...] = ()
            if shape.unsharded:
                try:
                    times = measure_blocks(candidates[0])
                except Refused as refusal:  # the rows of a batch cannot be computed separately
                    if _on_one_device(question) is None:
                        raise
                    log.info("Parallel: one device is used, because %s", refusal)
                    self._together.add(question.spec)
                    return self.choose(question, measure_memory, measure_machine, measure_blocks)
                if times.together:
                    self._together.add(question.spec)
                forwards = forward_times(times)
                candidates = [share_batch(forwards, plan) for plan in candidates]
                alternatives = [plan for plan in alternatives if plan.devices == devices]
            elif len(set(machine.kinds)) > 1:
                paces = paces_by(measure_blocks(candidates[0]))
                # the paces of other devices are not known
                alternatives = [plan for plan in alternatives if plan.devices == devices]
                candidates, alternatives = (
                    [share_by(paces, plan) for plan in plans] for plans in (candidates, alternatives)
                )
            profile = measured_profile(machine, memory, "cuda" in devices[0], paces, question.compiler)
            profile = replace(profile, forwards=forwards)
            if not requested_plan.stages:
                candidates = [_cut(plan, question, profile, measure_blocks) for plan in candidates]
                alternatives = [_cut(plan, question, profile, _equal_blocks(shape)) for plan in alternatives]
            fallback = [] if shape.unsharded else streamed(candidates)
            candidates, alternatives, fallback = (
                [share_by_memory(plan, shape, job, profile) for plan in plans]
                for plans in (candidates, alternatives, fallback)
            )
            approximate = requested_plan.pipefusion != 1 or requested_plan.patches > 1
            choice = best(
                candidates, shape, job, profile, approximate=approximate, alternatives=alternatives, fallback=fallback
            )
            self._log(question, choice)
            answer = self._answers[question] = MeasuredChoice(choice, memory)
        self.latest = answer
        return answer

    @staticmethod
    def _log(question: PlanRequest, choice: PlanChoice) -> None:
        job = question.job
        if not choice.plan.on_gpus:
            log.info("Parallel: %s, chosen for the CPU, whose times are not predicted", describe(choice.plan))
            return
        log.info(
            "Parallel: plans for %d image and %d text tokens, batch %d, by this machine's measured speed\n%s\nChosen: %s. %s",
            job.image_tokens,
            job.text_tokens,
            job.batch,
            table(choice.ranking, choice.plan),
            describe(choice.plan),
            choice.why,
        )
        if choice.better_alone:
            log.warning(
                "Parallel: one device alone is faster for this job: choose devices %s in Parallel Plan.",
                choice.single.plan.devices[0].removeprefix("cuda:"),
            )


def _on_one_device(question: PlanRequest) -> PlanRequest | None:
    """Return the request for the first of several automatic devices.

    Return None if the request names its devices, has only one, or asks for a cfg or data degree above 1.
    """
    requested_plan = question.requested_plan
    devices = feasible(requested_plan, question.gpus, question.shape.limits, question.workload)[0].devices
    if not is_automatic(requested_plan) or len(devices) < 2 or max(requested_plan.cfg, requested_plan.data) > 1:
        return None
    first = AUTOMATIC_AMONG + devices[0].removeprefix("cuda:")
    return replace(question, requested_plan=msgspec.structs.replace(requested_plan, devices=first))


def _fitting(choice: PlanChoice, memory: Sequence[float]) -> set[ResolvedPlan]:
    return {entry.plan for entry in (*choice.ranking, choice.single) if entry.breakdown.fits_into(memory)}


def _cut(
    plan: ResolvedPlan, question: PlanRequest, profile: Profile, measure_blocks: Callable[[ResolvedPlan], BlockTimes]
) -> ResolvedPlan:
    """Return the plan with its stages cut by the time that blocks take, as far as each stage has memory for its blocks."""
    if plan.pipefusion in (1, sum(plan.stages)):
        return plan
    lacks = lacking(plan, question.shape, question.job, profile)
    return msgspec.structs.replace(plan, stages=cut_by_time(plan, measure_blocks(plan), lacks))


def _equal_blocks(shape: ModelShape) -> Callable[[ResolvedPlan], BlockTimes]:
    """Return block times for plans without measurements: all blocks take equally long."""
    counts = shape.double_blocks, shape.single_blocks
    return lambda plan: BlockTimes(((1.0, 1.0),) * plan.world_size, counts)


def _leaner(question: PlanRequest) -> list[ResolvedPlan]:
    """Return plans on the same devices that hold less on each device."""
    free = ParallelPlan(devices=question.requested_plan.devices, attention=question.requested_plan.attention, data=0)
    kinds = ({"pipefusion": 0}, {"weights": "sharded"}, {"weights": "streamed"})
    wishes = [msgspec.structs.replace(free, **kind) for kind in kinds]
    limits, workload = question.shape.limits, question.workload
    return [plan for requested_plan in wishes for plan in candidates(requested_plan, question.gpus, limits, workload)]
