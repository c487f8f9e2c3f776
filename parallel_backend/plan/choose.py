"""The ranking of plans by their predicted cost, the choice among them, and its explanation in words."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import sub
from typing import NamedTuple

import msgspec

from ..errors import PlanRefused
from .advice import gigabytes
from .plan import ResolvedPlan, share_a_gpu
from .predict.chunks import in_chunks
from .predict.cost import StepCost
from .predict.profiles import DenoiseJob, ModelShape, Profile

EQUAL_MEMORY = 0.9
"""Messages treat all ranks as equal if the smallest free memory is more than this fraction of the largest."""

COMPILING_PAYS = 1.3
"""The smallest speedup by compiled blocks at which compiling is recommended, because compiling takes minutes."""

PARTS = ("device", "ulysses", "ring", "pipeline", "cfg", "gather", "launch", "fill")


class Ranked(NamedTuple):
    """A plan with its predicted seconds a step and their breakdown.

    `compiled` is the seconds a step with compiled blocks; None if that is not compared.
    """

    plan: ResolvedPlan
    seconds: float
    breakdown: StepCost
    compiled: float | None = None


@dataclass(frozen=True)
class PlanChoice:
    """The chosen plan, with the reason in one or two sentences.

    Attributes:
        plan: the chosen plan.
        ranking: the ranking of all candidates.
        single: the cost of the same job on one device.
        why: the reason.
        better_alone: one device is at least as fast as the chosen plan.
    """

    plan: ResolvedPlan
    ranking: list[Ranked]
    single: Ranked
    why: str
    better_alone: bool


def rank(
    candidates: Sequence[ResolvedPlan],
    model: ModelShape,
    job: DenoiseJob,
    profile: Profile,
) -> list[Ranked]:
    """Return the candidates in order of predicted seconds a step, each with its best number of head chunks.

    Plans that do not fit into memory come last.
    """
    ranked = []
    compares = profile.compares_compiled and not profile.compiled and not model.unsharded
    compared = replace(profile, compiled=True) if compares else None
    for candidate in candidates:
        plan, breakdown = in_chunks(candidate, model, job, profile)
        compiled = None if compared is None else in_chunks(candidate, model, job, compared)[1].seconds
        ranked.append(Ranked(plan, breakdown.seconds, breakdown, compiled))
    return sorted(ranked, key=lambda entry: (not entry.breakdown.fits, entry.seconds))


def best(
    candidates: Sequence[ResolvedPlan],
    model: ModelShape,
    job: DenoiseJob,
    profile: Profile,
    approximate: bool = False,
    alternatives: Sequence[ResolvedPlan] = (),
    fallback: Sequence[ResolvedPlan] = (),
) -> PlanChoice:
    """Return the fastest candidate that fits, with the reason; if none fits, the fastest plan of the fallback.

    Args:
        candidates: the plans to choose from.
        model: the model's shape.
        job: the job.
        profile: the machine.
        approximate: also choose among plans with PipeFusion patches, which change the picture.
        alternatives: plans that the user did not request. The refusal names one of them if no plan fits.
        fallback: plans to choose from if no candidate fits, such as those of `streamed`.

    Raises:
        Refused: no plan fits into memory. The message has the numbers and names a plan that fits.
    """
    ranking = rank(candidates, model, job, profile)
    fitting = [entry for entry in ranking if entry.breakdown.fits]
    allowed = [entry for entry in fitting if approximate or not is_approximate(entry.plan)]
    too_large = None
    if not allowed and fallback:
        others = rank(fallback, model, job, profile)
        allowed = [entry for entry in others if entry.breakdown.fits]
        too_large = _least(ranking)
        ranking = [*others, *ranking] if allowed else ranking
    if not allowed:
        instead = [entry for entry in rank(alternatives, model, job, profile) if entry.breakdown.fits]
        instead.sort(key=lambda entry: entry.plan.weights == "streamed")  # streamed weights are the last resort
        raise PlanRefused(_none_fits(ranking, fitting, instead, job))
    chosen = allowed[0]
    (single,) = rank([single_device(chosen.plan)], model, job, profile)
    alone = chosen.plan.world_size > 1 and single.breakdown.fits and single.seconds <= chosen.seconds
    why = _why(chosen, allowed, fitting or allowed, single)
    if too_large:
        need, free = too_large.breakdown.memory, too_large.breakdown.allowance
        why += (
            f" The weights are streamed from the computer's memory, because replicated weights do not fit ("
            f"{gigabytes(need)} needed, {gigabytes(free)} usable)."
        )
    return PlanChoice(chosen.plan, ranking, single, why, alone)


def streamed(plans: Sequence[ResolvedPlan]) -> list[ResolvedPlan]:
    """Return the exact GPU plans with replicated weights, changed to streamed weights."""
    return [
        msgspec.structs.replace(plan, weights="streamed")
        for plan in plans
        if plan.weights == "replicated" and not is_approximate(plan) and plan.on_gpus
    ]


def is_approximate(plan: ResolvedPlan) -> bool:
    """Return True if the plan attends to keys of the previous step, which changes the picture."""
    return plan.pipefusion > 1 or plan.patches > 1


def single_device(plan: ResolvedPlan) -> ResolvedPlan:
    """Return a plan for the first device of a plan alone."""
    return msgspec.structs.replace(
        plan,
        devices=plan.devices[:1],
        data=1,
        cfg=1,
        pipefusion=1,
        ring=1,
        ulysses=1,
        patches=1,
        stages=(sum(plan.stages),),
        shares=(1,),
        batch_shares=(),
        head_chunks=1,
        weights="streamed" if plan.weights == "streamed" else "replicated",
    )


def table(ranking: Sequence[Ranked], chosen: ResolvedPlan | None = None) -> str:
    """Return the ranking as a text table, with a star at the chosen plan.

    The columns are milliseconds per step, the same with compiled blocks, their parts, and gigabytes on the tightest device.
    """
    heads = ("", "plan", "ms/step", "compiled", *PARTS, "GB", "")
    rows: list[tuple[str, ...]] = [heads]
    for entry in ranking:
        notes = []
        if not entry.breakdown.fits:
            notes.append("does not fit")
        if entry.plan.weights != "replicated":
            notes.append(f"weights {entry.plan.weights}")
        if is_approximate(entry.plan):
            notes.append(f"{entry.plan.patches} patches: changes the picture")
        if entry.plan.exchanges_approximately:
            notes.append(f"exchange {entry.plan.exchange}: changes the picture")
        if entry.plan.head_chunks > 1:
            notes.append(f"heads in {entry.plan.head_chunks} chunks")
        parts = (f"{1e3 * getattr(entry.breakdown, part):.1f}" for part in PARTS)
        compiled = "" if entry.compiled is None else f"{1e3 * entry.compiled:.1f}"
        star = "*" if entry.plan == chosen else ""
        memory = f"{entry.breakdown.memory / 1e9:.1f}"
        rows.append(
            (star, entry.plan.degrees, f"{1e3 * entry.seconds:.1f}", compiled, *parts, memory, ", ".join(notes))
        )
    columns = [
        column for column in range(len(heads)) if column < 3 or any(row[column] not in ("", "0.0") for row in rows[1:])
    ]
    widths = {column: max(len(row[column]) for row in rows) for column in columns}
    text = {0, 1, len(heads) - 1}
    lines = (
        "  ".join(
            row[column].ljust(widths[column]) if column in text else row[column].rjust(widths[column])
            for column in columns
        )
        for row in rows
    )
    return "\n".join(line.rstrip() for line in lines)


def _none_fits(ranking: Sequence[Ranked], fitting: Sequence[Ranked], instead: Sequence[Ranked], job: DenoiseJob) -> str:
    if fitting:
        return (
            f"Only PipeFusion fits into {gigabytes(fitting[0].breakdown.allowance)} ({fitting[0].plan.degrees} needs "
            f"{gigabytes(fitting[0].breakdown.memory)}), and it changes the picture slightly: choose preset slow links to allow "
            "it, or weights sharded, or smaller weights (fp8, GGUF)."
        )
    if not ranking:
        return "no plan works for this job on these devices: set all degrees to 0 (automatic), or choose other devices."
    least = _least(ranking)
    need, weights = least.breakdown.memory, least.breakdown.weights
    ways_out = []
    if instead:
        alternative = instead[0]
        how = "" if alternative.plan.weights == "replicated" else f" with weights {alternative.plan.weights}"
        ways_out.append(f"use {alternative.plan.degrees}{how}, which needs {gigabytes(alternative.breakdown.memory)}")
    saved = tuple(share * (1 - 1 / max(1, job.weight_element)) for share in least.breakdown.rank_weights)
    in_fp8 = replace(least.breakdown, needed=tuple(map(sub, least.breakdown.needed, saved)))
    if any(saved) and in_fp8.fits:
        ways_out.append(f"try weight_dtype fp8_e4m3fn ({gigabytes(in_fp8.memory)})")
    if not ways_out:
        ways_out = ["use more devices, smaller weights (fp8, GGUF) or a smaller size, length or batch"]
    one_each = least.plan.devices[0].startswith("cuda") and not share_a_gpu(least.plan.devices)
    memory, where = ("GPU memory", "on each GPU") if one_each else ("memory", "for each worker")
    if not _equal_memory(least):
        where = f"on {_tightest(least)}"
    return (
        f"Not enough {memory}: the smallest plan, {least.plan.degrees}, needs {gigabytes(need)} {where} ({gigabytes(weights)} "
        f"of it weights), and {_available(least)}: {', or '.join(ways_out)}."
    )


def _least(ranking: Sequence[Ranked]) -> Ranked:
    """Return the plan that lacks the least memory."""
    return min(ranking, key=lambda entry: entry.breakdown.memory - entry.breakdown.allowance)


def _available(least: Ranked) -> str:
    """Return in words the memory that the tightest worker may use, and whether the user set the limit."""
    plan, allowance = least.plan, least.breakdown.allowance
    sharers = max(plan.devices.count(device) for device in plan.devices)
    if plan.memory_limit and math.isclose(allowance * sharers, plan.memory_limit * 1e9):
        return f"each may use {gigabytes(allowance)} (memory_limit {plan.memory_limit:g})"
    return f"{'each' if _equal_memory(least) else _tightest(least)} has {gigabytes(allowance)} free"


def _equal_memory(entry: Ranked) -> bool:
    """Return True if about the same memory is free to every rank."""
    return min(entry.breakdown.free) > EQUAL_MEMORY * max(entry.breakdown.free)


def _tightest(entry: Ranked) -> str:
    """Return the device of the tightest rank, or the worker's number if several workers share the device."""
    rank, devices = entry.breakdown.tightest, entry.plan.devices
    return devices[rank] if devices.count(devices[rank]) == 1 else f"worker {rank} of {len(devices)}"


def _why(chosen: Ranked, allowed: Sequence[Ranked], fitting: Sequence[Ranked], single: Ranked) -> str:
    sentences = []
    if chosen.plan.world_size > 1:
        sentences.append(_against_single(chosen, single))
    alternatives = [entry for entry in allowed if entry.plan.degrees != chosen.plan.degrees]
    if alternatives:
        second = alternatives[0]
        gain = second.seconds / chosen.seconds - 1
        percent = f"{100 * gain:.0f}" if gain >= 0.01 else "less than 1"
        sentences.append(f"The next best plan, {second.plan.degrees}, takes {percent} % longer.")
    fastest = fitting[0]
    if fastest.seconds < chosen.seconds:
        sentences.append(
            f"{fastest.plan.degrees} would take {_ms(fastest.seconds)} but changes the picture slightly: choose preset slow "
            "links to use it."
        )
    if chosen.compiled is not None and chosen.seconds > COMPILING_PAYS * chosen.compiled:
        sentences.append(
            f"With compiled blocks it would take {_ms(chosen.compiled)}, {chosen.seconds / chosen.compiled:.1f}x as fast: choose "
            "compile on in Parallel Plan."
        )
    return " ".join(sentences) or "Only one device and one plan can be chosen."


def _against_single(chosen: Ranked, single: Ranked) -> str:
    name = f"{chosen.plan.degrees} on {chosen.plan.world_size} devices"
    if not single.breakdown.fits:
        return (
            f"{name} takes {_ms(chosen.seconds)} a step; one device cannot hold the job "
            f"({single.breakdown.memory / 1e9:.1f} GB needed, {single.breakdown.allowance / 1e9:.1f} GB free)."
        )
    if single.seconds <= chosen.seconds:
        return (
            f"One device is faster: {_ms(single.seconds)} a step, against {_ms(chosen.seconds)} with {name}, "
            f"{_main_loss(chosen.breakdown)}."
        )
    speedup = single.seconds / chosen.seconds
    return f"{name} takes {_ms(chosen.seconds)} a step, {speedup:.2f}x as fast as one device ({_ms(single.seconds)})."


def _main_loss(breakdown: StepCost) -> str:
    """Return in words the part, besides computing, that takes most of the plan's time."""
    spent = {
        "waits for its all-to-alls": breakdown.ulysses,
        "waits for its ring": breakdown.ring,
        "waits for the pipeline": breakdown.pipeline + breakdown.fill,
        "waits for the other CFG branch": breakdown.cfg,
        "waits for weights": breakdown.gather,
        "is launching kernels": breakdown.launch,
    }
    reason = max(spent, key=lambda name: spent[name])
    return f"of which {_ms(spent[reason])} {reason.replace('waits', 'is waiting', 1)}"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"
