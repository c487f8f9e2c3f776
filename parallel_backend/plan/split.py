"""Shares of unequal ranks: blocks to pipeline stages, and tokens to the ranks of Ulysses and Ring."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import msgspec

from .plan import ResolvedPlan
from .predict.cost import DenoiseJob, Lacking, needed_by_rank
from .predict.measure import BlockTimes
from .predict.profiles import ForwardTime, ModelShape, Profile


def cut_by_time(plan: ResolvedPlan, times: BlockTimes, lacks: Lacking) -> tuple[int, ...]:
    """Return the number of blocks of each pipeline stage that makes the slowest stage, on its slowest rank, as fast as possible.

    Args:
        lacks: of the plan's stages.
    """
    costs = [_block_seconds(times, plan.stage_ranks(stage)) for stage in range(plan.pipefusion)]
    fastest = cut_by_cost(costs, lambda stage, first, count: 0.0)
    starts = accumulate(fastest, initial=0)
    if not any(lacks(stage, first, count) for stage, (first, count) in enumerate(zip(starts, fastest, strict=False))):
        return fastest  # as ever where there is memory enough, which saves asking for every run of blocks
    return cut_by_cost(costs, lacks)


def cut_by_cost(costs: Sequence[Sequence[float]], lacks: Lacking) -> tuple[int, ...]:
    """Contiguous runs of blocks, at least one each, whose largest cost is least; among those, whose squares are.

    Of cuts that do not fit, the one that lacks least is taken, for it to be refused with that.

    Args:
        costs: what each block would cost on each stage, `[stage][block]`.
        lacks: what a stage would lack for some of them.
    """
    sums = [[0.0, *accumulate(stage)] for stage in costs]
    blocks = len(costs[0])
    assert len(costs) <= blocks
    # best[stop]: the least (bytes lacking, largest cost, sum of squares) of the stages so far over blocks up to `stop`, and
    # their cuts
    best: dict[int, tuple[float, float, float, tuple[int, ...]]] = {0: (0.0, 0.0, 0.0, ())}
    for stage, total in enumerate(sums):
        stages_after = len(costs) - stage - 1
        ways: dict[int, tuple[float, float, float, tuple[int, ...]]] = {}
        for start, (lack, largest, squares, cuts) in best.items():
            for stop in range(start + 1, blocks - stages_after + 1):
                seconds = total[stop] - total[start]
                way = (lack, max(largest, seconds), squares + seconds**2, (*cuts, stop - start))
                if stop not in ways or way < ways[stop]:  # at the best
                    way = (max(lack, lacks(stage, start, stop - start)), *way[1:])
                    ways[stop] = min(ways.get(stop, way), way)
        best = ways
    return best[blocks][3]


def _block_seconds(times: BlockTimes, ranks: Sequence[int]) -> list[float]:
    kinds = range(len(times.counts))
    slowest = [max(times.seconds[rank][kind] for rank in ranks) for kind in kinds]
    return [slowest[kind] for kind in kinds for _ in range(times.counts[kind])]


FASTEST = 100
"""The share of the fastest rank."""

ALIKE = 1.05
"""Ranks whose speeds differ by less than this factor, which measuring cannot tell apart, are given the same."""


def paces_by(times: BlockTimes) -> tuple[float, ...]:
    """Return each rank's speed over a model's blocks, relative to the slowest rank."""
    seconds = [sum(count * forward for count, forward in zip(times.counts, own, strict=True)) for own in times.seconds]
    return tuple(max(seconds) / own for own in seconds)


def forward_times(times: BlockTimes) -> tuple[ForwardTime, ...]:
    """Return each rank's forward time, from its times for one item and for several items (`BlockTimes.counts`)."""
    (few, many), forwards = times.counts, []
    for short, long in times.seconds:
        item = max(0.0, long - short) / (many - few)
        forwards.append(ForwardTime(max(0.0, short - few * item), item or short))
    return tuple(forwards)


def share_batch(forwards: Sequence[ForwardTime], plan: ResolvedPlan) -> ResolvedPlan:
    """Return the plan with its batch split by the speed of the slowest rank that computes each part."""
    slowest = [0.0] * plan.data
    for rank, time in enumerate(forwards[: plan.world_size]):
        part = plan.place(rank).data
        slowest[part] = max(slowest[part], time.item)
    if max(slowest) < ALIKE * min(slowest):
        return plan
    shares = tuple(max(1, round(FASTEST * min(slowest) / seconds)) for seconds in slowest)
    return msgspec.structs.replace(plan, batch_shares=shares)


def share_by(paces: Sequence[float], plan: ResolvedPlan) -> ResolvedPlan:
    """The plan with its tokens cut by speed.

    A place among the sequence ranks gets what suits the slowest of the ranks there, since all branches, stages and parts of
    the batch are cut alike.

    Args:
        paces: every rank's speed, in any unit.
    """
    ranks = len(plan.shares)
    slowest = [min(paces[rank::ranks]) for rank in range(ranks)]
    if max(slowest) < ALIKE * min(slowest):
        return plan
    shares = tuple(max(1, round(FASTEST * pace / max(slowest))) for pace in slowest)
    return msgspec.structs.replace(plan, shares=shares)


def share_by_memory(plan: ResolvedPlan, model: ModelShape, job: DenoiseJob, profile: Profile) -> ResolvedPlan:
    """Return the plan with tokens moved from ranks that lack memory for them to the ranks with the most free memory.

    It is what it was where all have room, and where that does not help: every rank holds its weights whatever its tokens are.
    """
    ranks = len(plan.shares)

    def free_bytes(shares: Sequence[int]) -> list[float]:
        """Return the bytes that remain on the fullest rank at each position."""
        cut = msgspec.structs.replace(plan, shares=tuple(shares))
        free = [profile.memory(rank) - needed for rank, needed in enumerate(needed_by_rank(cut, model, job, profile))]
        return [min(free[rank::ranks]) for rank in range(ranks)]

    def lack(spare: Sequence[float]) -> float:
        return -sum(min(0.0, free) for free in spare)

    spare = free_bytes(plan.shares)
    if min(spare) >= 0:
        return plan
    shares = [max(1, FASTEST * share // max(plan.shares)) for share in plan.shares]
    while before := lack(spare):
        fullest, emptiest = spare.index(min(spare)), spare.index(max(spare))
        shares[fullest] -= 1
        shares[emptiest] += 1
        if shares[fullest] < 1 or lack(spare := free_bytes(shares)) >= before:
            return plan
    return msgspec.structs.replace(plan, shares=tuple(shares))
