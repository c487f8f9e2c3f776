"""From a wish to a plan that can run: all candidates, the choice among them, and the one-sentence refusals."""

from __future__ import annotations

import math
from collections.abc import Iterator

from ..errors import Refused
from ..layout import cut, length
from .devices import named_devices, visible
from .plan import AXES, MAX_WORLD_SIZE, WEIGHTS, ModelLimits, ParallelPlan, ResolvedPlan, Workload


def check(plan: ParallelPlan, gpus: int, limits: ModelLimits) -> tuple[str, ...]:
    """The devices of a plan that some job can run on; see `resolve` for what is refused."""
    for two_sided in (True, False):
        try:
            return resolve(plan, gpus, limits, Workload(MAX_WORLD_SIZE, two_sided, 1 << 30)).devices
        except Refused as refusal:
            reason = refusal
    raise reason


def resolve(plan: ParallelPlan, gpus: int, limits: ModelLimits, job: Workload) -> ResolvedPlan:
    """The plan with every choice made: the best candidate, for a machine that shows `gpus` GPUs.

    Raises:
        Refused: the plan cannot work; the sentence names one that does.
    """
    _check_fields(plan, limits, job)
    found = candidates(plan, gpus, limits, job)
    if found:
        return min(found, key=_preference)
    raise Refused(_why_none(plan, gpus, limits, job))


def candidates(plan: ParallelPlan, gpus: int, limits: ModelLimits, job: Workload) -> list[ResolvedPlan]:
    """Every plan that does what is asked for, with the automatic degrees chosen in every possible way."""
    devices = named_devices(plan.devices, gpus)
    wish = [getattr(plan, axis) for axis in AXES]
    if plan.devices.strip().lower() == "auto" and all(wish) and math.prod(wish) <= len(devices):
        devices = devices[: math.prod(wish)]
    fits = []
    for data, cfg, stages, ring, ulysses in _factorisations(len(devices), len(AXES)):
        asked = zip((data, cfg, stages, ring, ulysses), wish, strict=True)
        if any(wanted not in (0, degree) for degree, wanted in asked):
            continue
        if ulysses > limits.heads or stages > limits.blocks or data > job.batch or cfg > (2 if job.two_sided else 1):
            continue
        if plan.weights == "sharded" and stages > 1:
            continue
        patches = plan.patches or stages
        if patches > job.token_rows:
            continue
        fits.append(
            ResolvedPlan(
                devices=devices,
                data=data,
                cfg=cfg,
                pipefusion=stages,
                ring=ring,
                ulysses=ulysses,
                patches=patches,
                warmup_steps=plan.warmup_steps,
                stages=_stages(plan, stages, limits),
                weights=plan.weights,
                attention=plan.attention,
            )
        )
    return fits


def _preference(plan: ResolvedPlan) -> tuple[int, ...]:
    """Without a cost model: CFG first (one exchange a step), then Ulysses (fewest bytes), then Ring."""
    return (plan.data, -plan.cfg, plan.pipefusion, -plan.ulysses, plan.ring)


def _factorisations(number: int, parts: int) -> Iterator[tuple[int, ...]]:
    if parts == 1:
        yield (number,)
        return
    for divisor in range(1, number + 1):
        if number % divisor == 0:
            for rest in _factorisations(number // divisor, parts - 1):
                yield (divisor, *rest)


def _stages(plan: ParallelPlan, stages: int, limits: ModelLimits) -> tuple[int, ...]:
    if plan.stages:
        return tuple(int(part) for part in plan.stages.split(","))
    return tuple(length(run) for run in cut(limits.blocks, stages))


def _check_fields(plan: ParallelPlan, limits: ModelLimits, job: Workload) -> None:
    """Refuse what is wrong by itself, whatever the devices are."""
    for axis in AXES:
        if getattr(plan, axis) < 0:
            raise Refused(f"{axis} {getattr(plan, axis)} is no degree: use 0 for automatic, or 1 and more.")
    if plan.weights not in WEIGHTS:
        raise Refused(f"weights {plan.weights!r} is unknown: use {' or '.join(WEIGHTS)}.")
    if plan.patches < 0 or plan.warmup_steps < 0:
        raise Refused(
            f"patches {plan.patches} and warmup_steps {plan.warmup_steps} cannot be negative: use 0 (automatic) or more."
        )
    if plan.cfg > 2:
        raise Refused(f"cfg {plan.cfg} is too many, there are a positive and a negative side: use cfg 2 or 1.")
    if plan.cfg == 2 and not job.two_sided:
        raise Refused(
            "cfg 2 needs a negative prompt, and this sampling has none (at cfg 1, or with BasicGuider, it is unused): "
            "set cfg to 0 or 1 in the plan, or the sampler's cfg above 1."
        )
    if plan.ulysses > limits.heads:
        raise Refused(
            f"ulysses {plan.ulysses} is more than the model's {limits.heads} attention heads: "
            f"use ulysses {limits.heads} at most and put the rest into ring."
        )
    if plan.pipefusion > limits.blocks:
        raise Refused(
            f"pipefusion {plan.pipefusion} is more than the model's {limits.blocks} blocks: use {limits.blocks} at most."
        )
    if plan.weights == "sharded" and plan.pipefusion > 1:
        raise Refused(
            f"weights sharded does not go with pipefusion {plan.pipefusion}, which splits the weights already: "
            "use weights replicated, or pipefusion 1."
        )
    if plan.data > job.batch:
        raise Refused(f"data {plan.data} is more than the batch of {job.batch}: use data {job.batch} or a larger batch.")
    patches = plan.patches or plan.pipefusion
    if patches > job.token_rows:
        raise Refused(
            f"{patches} patches are more than the picture's {job.token_rows} rows of tokens: "
            f"use patches {job.token_rows} at most, or a taller picture."
        )
    if plan.stages:
        _check_stages(plan, limits)


def _check_stages(plan: ParallelPlan, limits: ModelLimits) -> None:
    even = ",".join(str(length(run)) for run in cut(limits.blocks, max(1, plan.pipefusion)))
    parts = plan.stages.split(",")
    if not all(part.strip().isdecimal() and int(part) > 0 for part in parts):
        raise Refused(f'stages {plan.stages!r} is not understood: write blocks a stage such as "{even}", or nothing.')
    sizes = [int(part) for part in parts]
    if len(sizes) != plan.pipefusion or sum(sizes) != limits.blocks:
        raise Refused(
            f"stages {plan.stages!r} gives {len(sizes)} stages with {sum(sizes)} blocks, and pipefusion {plan.pipefusion} "
            f'needs {plan.pipefusion} with {limits.blocks}: write "{even}", or nothing.'
        )


def _why_none(plan: ParallelPlan, gpus: int, limits: ModelLimits, job: Workload) -> str:
    """The refusal of degrees that do not come to the number of workers."""
    world = len(named_devices(plan.devices, gpus))
    asked = " x ".join(f"{axis} {getattr(plan, axis)}" for axis in AXES if getattr(plan, axis) > 1) or "these degrees"
    product = math.prod(max(1, getattr(plan, axis)) for axis in AXES)
    free = ParallelPlan(devices=plan.devices, weights=plan.weights)
    best = min(candidates(free, gpus, limits, job), key=_preference, default=None)
    instead = f"use {_spell(best)}" if best else "choose other devices"
    if plan.devices.strip().lower() == "auto" and product > world:
        return (
            f"{asked} needs {product} devices and {visible(gpus)}: {instead}, or write cpu:{product} into devices "
            "to try it without GPUs."
        )
    workers = f"{world} workers" if world != 1 else "1 worker"
    return (
        f"{asked} does not come to the {workers} of devices {plan.devices!r}: {instead}, "
        "set degrees to 0 (automatic), or choose other devices."
    )


def _spell(plan: ResolvedPlan) -> str:
    return f"ring {plan.ring} x ulysses {plan.ulysses}" + (f" x cfg {plan.cfg}" if plan.cfg > 1 else "")
