"""The way from a requested plan to a plan that can run: all candidates, the choice among them, and the refusals."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import msgspec

from ..errors import PlanRefused
from ..layout import cut, length
from ..mesh_axes import PLAN_AXES, SEQUENCE_AXES, MeshAxis, mesh_degrees
from .devices import AUTOMATIC_AMONG, named_devices, visible
from .plan import (
    COMPILE,
    EXCHANGES,
    MAX_WORLD_SIZE,
    WEIGHTS,
    ModelLimits,
    ParallelPlan,
    ResolvedPlan,
    Workload,
    share_a_gpu,
)
from .unsharded import refuse_unsharded, usable


def check(plan: ParallelPlan, gpus: int, limits: ModelLimits) -> tuple[str, ...]:
    """Return the devices of a requested plan, if some job can run with it. Raise Refused as `resolve` does."""
    return resolve(plan, gpus, limits, Workload(MAX_WORLD_SIZE, plan.cfg == 2, 1 << 30)).devices


def resolve(plan: ParallelPlan, gpus: int, limits: ModelLimits, workload: Workload) -> ResolvedPlan:
    """Return the best candidate for a requested plan, chosen without a cost model.

    Args:
        plan: the requested plan.
        gpus: the number of visible GPUs.
        limits: the model's limits.
        workload: the job's limits.

    Raises:
        Refused: the plan cannot work. The sentence names a plan that does.
    """
    return min(feasible(plan, gpus, limits, workload), key=_preference)


def feasible(plan: ParallelPlan, gpus: int, limits: ModelLimits, workload: Workload) -> list[ResolvedPlan]:
    """Return all candidates, at least one. Raise Refused as `resolve` does."""
    _check_fields(plan, gpus, limits, workload)
    plans = candidates(plan, gpus, limits, workload)
    if not plans:
        raise PlanRefused(_why_none(plan, gpus, limits, workload))
    return plans


def candidates(plan: ParallelPlan, gpus: int, limits: ModelLimits, workload: Workload) -> list[ResolvedPlan]:
    """Return every plan that meets the requested plan, with the automatic degrees chosen in every possible way."""
    devices = planned_devices(plan, gpus)
    if limits.unsharded:
        if plan.weights != "replicated":
            return []
        devices = devices[: usable(plan, len(devices), workload)] if is_automatic(plan) else devices
    requested_plan = [getattr(plan, axis) for axis in PLAN_AXES]
    fits = []
    for degrees in _factorisations(len(devices), len(PLAN_AXES)):
        data, cfg, stages, ring, ulysses = degrees
        if any(requested not in (0, degree) for requested, degree in zip(requested_plan, degrees, strict=True)):
            continue
        if (
            ulysses > limits.heads
            or stages > limits.blocks
            or data > workload.batch
            or cfg > (2 if workload.has_uncond else 1)
            or (limits.unsharded and ring > 1)
        ):
            continue
        if plan.weights == "sharded" and (stages > 1 or share_a_gpu(devices)):
            continue
        patches = plan.patches or min(stages, workload.token_rows)
        if patches > workload.token_rows or (limits.whole_picture and max(patches, stages) > 1):
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
                memory_limit=plan.memory_limit,
                shares=(1,) * (ring * ulysses),
                exchange=plan.exchange,
            )
        )
    return fits


def planned_devices(plan: ParallelPlan, gpus: int) -> tuple[str, ...]:
    """Return the devices that the plan names; of automatic devices as many as the degrees need.

    Raises:
        Refused: a device is not there.
    """
    devices = named_devices(plan.devices, gpus)
    product = math.prod(max(1, getattr(plan, axis)) for axis in PLAN_AXES)
    return devices[:product] if is_automatic(plan) and _fixed(plan) else devices


def in_rows(plan: ParallelPlan, devices: tuple[str, ...]) -> ResolvedPlan:
    """Return the plan of work that is cut in space, such as a VAE's: all devices on the ring axis, whatever the degrees."""
    return ResolvedPlan(
        devices=devices,
        shares=(1,) * len(devices),
        **mesh_degrees(ring=len(devices)),
        patches=1,
        warmup_steps=0,
        stages=(),
        weights="replicated",
        attention=plan.attention,
        memory_limit=plan.memory_limit,
    )


def is_automatic(plan: ParallelPlan) -> bool:
    """Return True if the devices are chosen for the user."""
    requested_plan = plan.devices.strip().lower()
    return requested_plan == "auto" or requested_plan.startswith(AUTOMATIC_AMONG)


def _fixed(plan: ParallelPlan) -> bool:
    """Return True if the degrees fix the number of devices. Automatic cfg and data degrees then count as 1."""
    return all(getattr(plan, axis) for axis in PLAN_AXES if axis not in (MeshAxis.CFG, MeshAxis.DATA))


def _preference(plan: ResolvedPlan) -> tuple[int, ...]:
    """Return the sort key without a cost model: CFG first (one exchange a step), then Ulysses (fewest bytes), then Ring."""
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


def _check_fields(plan: ParallelPlan, gpus: int, limits: ModelLimits, workload: Workload) -> None:
    """Refuse fields that are wrong whatever the product of the degrees is."""
    for axis in PLAN_AXES:
        if getattr(plan, axis) < 0:
            raise PlanRefused(f"{axis} {getattr(plan, axis)} is negative: use 0 (automatic), or 1 or more.")
    if plan.weights not in WEIGHTS:
        raise PlanRefused(f"weights {plan.weights!r} is unknown: use {', '.join(WEIGHTS[:-1])} or {WEIGHTS[-1]}.")
    if plan.exchange not in EXCHANGES:
        raise PlanRefused(f"exchange {plan.exchange!r} is unknown: use {' or '.join(EXCHANGES)}.")
    if plan.compile not in COMPILE:
        raise PlanRefused(f"compile {plan.compile!r} is unknown: use {' or '.join(COMPILE)}.")
    if plan.weights == "sharded" and share_a_gpu(planned_devices(plan, gpus)):
        raise PlanRefused(
            f"weights sharded needs a GPU for each worker, and devices {plan.devices!r} puts several on one: use weights "
            "replicated, or name each GPU once."
        )
    if not 0 <= plan.memory_limit < math.inf:
        raise PlanRefused(
            f"memory_limit {plan.memory_limit} is not an amount of memory: use gigabytes for each GPU, such as 20, or 0 for "
            "all that is free."
        )
    if plan.patches < 0 or plan.warmup_steps < 0:
        raise PlanRefused(
            f"patches {plan.patches} and warmup_steps {plan.warmup_steps} cannot be negative: use 0 (automatic) or more."
        )
    if plan.cfg > 2:
        raise PlanRefused(
            f"cfg {plan.cfg} is more than the 2 prompts, the positive and the negative one: use cfg 2 or 1."
        )
    if plan.cfg == 2 and not workload.has_uncond:
        raise PlanRefused(
            "cfg 2 needs a negative prompt, and this sampling has none for this model (at cfg 1, or with BasicGuider, it is "
            "unused): set cfg to 0 or 1 in the plan, or the sampler's cfg above 1."
        )
    if limits.unsharded and plan.data <= workload.batch:
        devices = planned_devices(plan, gpus)
        workers = usable(plan, len(devices), workload) if is_automatic(plan) else len(devices)
        refuse_unsharded(plan, workers, workload)
        return
    _refuse_too_many(plan, gpus, limits, workload)
    if plan.ulysses > limits.heads:
        raise PlanRefused(
            f"ulysses {plan.ulysses} is more than the model's {limits.heads} attention heads: "
            f"{_cure(plan, gpus, limits, workload)}."
        )
    if plan.pipefusion > limits.blocks:
        raise PlanRefused(
            f"pipefusion {plan.pipefusion} is more than the model's {limits.blocks} blocks: "
            f"{_cure(plan, gpus, limits, workload)}."
        )
    if plan.weights == "sharded" and plan.pipefusion > 1:
        raise PlanRefused(
            f"weights sharded cannot be used with pipefusion {plan.pipefusion}, which splits the weights already: "
            "use weights replicated, or pipefusion 1."
        )
    if plan.data > workload.batch:
        raise PlanRefused(
            f"data {plan.data} is more than the batch of {workload.batch}: use data {workload.batch} or a larger batch."
        )
    patches = plan.patches or plan.pipefusion
    if limits.whole_picture and max(patches, plan.pipefusion) > 1:
        raise PlanRefused(
            f"pipefusion {max(1, plan.pipefusion)} with patches {patches} cannot be used with this model, which needs the whole "
            "picture at once: use pipefusion 1 and patches 1, and ulysses or ring instead."
        )
    if plan.patches > workload.token_rows:
        raise PlanRefused(
            f"patches {plan.patches} is more than the picture's {workload.token_rows} rows of tokens: "
            f"use patches {workload.token_rows} at most, or a taller picture."
        )
    if plan.stages:
        _check_stages(plan, limits)


def _check_stages(plan: ParallelPlan, limits: ModelLimits) -> None:
    stages = max(1, plan.pipefusion)
    even = ",".join(str(length(run)) for run in cut(limits.blocks, stages))
    parts = plan.stages.split(",")
    if not all(part.strip().isdecimal() and len(part) < 10 and int(part) > 0 for part in parts):
        raise PlanRefused(
            f'stages {plan.stages!r} is not understood: write the blocks of each stage, such as "{even}", or leave it empty.'
        )
    sizes = [int(part) for part in parts]
    if len(sizes) != stages or sum(sizes) != limits.blocks:
        raise PlanRefused(
            f"stages {plan.stages!r} is {len(sizes)} stages with {' + '.join(map(str, sizes))} = {sum(sizes)} blocks, but "
            f"pipefusion {stages} needs {stages} stages and the model has {limits.blocks} blocks: write "
            f'"{even}", or leave it empty.'
        )


def _why_none(plan: ParallelPlan, gpus: int, limits: ModelLimits, workload: Workload) -> str:
    """Return the refusal of degrees whose product is not the number of workers, although there are enough devices."""
    count = len(named_devices(plan.devices, gpus))
    product, cure = _product(plan), _cure(plan, gpus, limits, workload)
    if count % product == 0 and plan.ring and not plan.ulysses:
        share = f"{count} / {product} = {count // product}" if product > 1 else f"{count}"
        return (
            f"{_degrees(plan)}, and {_counted(count, 'device')}: that leaves ulysses {share}, more than the model's "
            f"{limits.heads} attention heads; {cure}."
        )
    open_ended = count % product and not all(getattr(plan, axis) for axis in PLAN_AXES)
    several = " or a multiple of that" if open_ended else ""
    workers = f"{product} worker{'s' * (product > 1)}{several}"
    return f"{_degrees(plan)} needs {workers}, but {_counted(count, 'device')} (devices {plan.devices!r}): {cure}."


def _refuse_too_many(plan: ParallelPlan, gpus: int, limits: ModelLimits, workload: Workload) -> None:
    """Refuse degrees that need more workers than there are devices."""
    count, product = len(named_devices(plan.devices, gpus)), _product(plan)
    if product <= count:
        return
    there = visible(gpus) if is_automatic(plan) else f"{_counted(count, 'device')} (devices {plan.devices!r})"
    cure = _cure(plan, gpus, limits, workload)
    trial = msgspec.structs.replace(plan, devices=f"cpu:{product}")
    if is_automatic(plan) and product <= MAX_WORLD_SIZE and candidates(trial, gpus, limits, workload):
        cure += f", or set devices to {trial.devices} to try it without GPUs"
    raise PlanRefused(f"{product} workers were asked for ({_degrees(plan)}), but {there}: {cure}.")


def _product(plan: ParallelPlan) -> int:
    return math.prod(max(1, getattr(plan, axis)) for axis in PLAN_AXES)


def _degrees(plan: ParallelPlan) -> str:
    """Return the requested degrees above 1 in words, or else the degrees of the sequence axes."""
    axes = [axis for axis in PLAN_AXES if getattr(plan, axis) > 1] or [
        axis for axis in SEQUENCE_AXES if getattr(plan, axis)
    ]
    return " x ".join(f"{axis} {getattr(plan, axis)}" for axis in axes)


def _counted(count: int, kind: str) -> str:
    return f"{count} {kind}s are there" if count != 1 else f"1 {kind} is there"


def _cure(plan: ParallelPlan, gpus: int, limits: ModelLimits, workload: Workload) -> str:
    """Return in words the fewest degrees to change on the same devices, with values that work."""
    free = ParallelPlan()
    fixed = [axis for axis in PLAN_AXES if getattr(plan, axis) not in (0, getattr(free, axis))]
    base = ParallelPlan(devices=plan.devices, weights=plan.weights, **{axis: getattr(plan, axis) for axis in PLAN_AXES})
    for number in range(1, len(fixed) + 1):
        cures = [
            (found, changed)
            for changed in itertools.combinations(fixed, number)
            for found in candidates(
                msgspec.structs.replace(base, **{axis: getattr(free, axis) for axis in changed}), gpus, limits, workload
            )
        ]
        if cures:
            found, changed = min(cures, key=lambda cure: _preference(cure[0]))
            return _setting({axis: getattr(found, axis) for axis in changed})
    return "set all degrees to 0 (automatic)"


def _setting(degrees: dict[MeshAxis, int]) -> str:
    """Return the instruction to set these degrees."""
    *firsts, last = [f"{axis} to {degree}" for axis, degree in degrees.items()]
    listed = f"{', '.join(firsts)} and {last}" if firsts else last
    them = ("", "both ", "all ")[min(len(firsts), 2)]
    return f"set {listed}, or {them}to 0 for automatic"
