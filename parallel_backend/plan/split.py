"""Shares of unequal ranks: blocks to pipeline stages, and tokens to the ranks of Ulysses and Ring."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import msgspec

from .plan import ResolvedPlan
from .predict.measure import BlockTimes
from .predict.memory import Lacking, needed_by_rank
from .predict.profiles import DenoiseJob, ForwardTime, ModelShape, Profile


def cut_by_time(plan: ResolvedPlan, times: BlockTimes, lacks: Lacking) -> tuple[int, ...]:
    """Return the numbers of blocks of the pipeline stages for which the slowest stage, on its slowest rank, is fastest.

    Args:
        plan: the plan.
        times: the measured seconds of blocks.
        lacks: returns the bytes that a stage of the plan lacks for a run of blocks.
    """
    costs = [_block_seconds(times, plan.stage_ranks(stage)) for stage in range(plan.pipefusion)]
    fastest = cut_by_cost(costs, lambda stage, first, count: 0.0)
    starts = accumulate(fastest, initial=0)
    if not any(lacks(stage, first, count) for stage, (first, count) in enumerate(zip(starts, fastest, strict=False))):
        return fastest  # with enough memory, this saves calling `lacks` for every run of blocks
    return cut_by_cost(costs, lacks)


def cut_by_cost(costs: Sequence[Sequence[float]], lacks: Lacking) -> tuple[int, ...]:
    """Cut the blocks into contiguous runs, at least one block each, with the smallest largest cost of a run.

    Among equal cuts, the sum of the squared costs is smallest. If no cut fits, the result is the cut that lacks the fewest
    bytes, so that the refusal can name that number.

    Args:
        costs: the cost of each block on each stage, `[stage][block]`.
        lacks: returns the bytes that a stage lacks for a run of blocks.

    Returns:
        The number of blocks of each stage.
    """
    sums = [[0.0, *accumulate(stage)] for stage in costs]
    blocks = len(costs[0])
    assert len(costs) <= blocks
    # best[stop]: the least (bytes lacking, largest cost, sum of squares) of the stages so far over the blocks before `stop`,
    # and their cuts
    best: dict[int, tuple[float, float, float, tuple[int, ...]]] = {0: (0.0, 0.0, 0.0, ())}
    for stage, total in enumerate(sums):
        stages_after = len(costs) - stage - 1
        ways: dict[int, tuple[float, float, float, tuple[int, ...]]] = {}
        for start, (lack, largest, squares, cuts) in best.items():
            for stop in range(start + 1, blocks - stages_after + 1):
                seconds = total[stop] - total[start]
                way = (lack, max(largest, seconds), squares + seconds**2, (*cuts, stop - start))
                if stop not in ways or way < ways[stop]:  # `lacks` can only make a way worse
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

EQUAL_SPEED = 1.05
"""Ranks whose speeds differ by less than this factor get equal shares, because measuring cannot tell them apart."""


def paces_by(times: BlockTimes) -> tuple[float, ...]:
    """Return each rank's speed over a model's blocks, relative to the slowest rank."""
    seconds = [sum(count * forward for count, forward in zip(times.counts, own, strict=True)) for own in times.seconds]
    return tuple(max(seconds) / own for own in seconds)


def forward_times(times: BlockTimes) -> tuple[ForwardTime, ...]:
    """Return each rank's forward time, from its times for few and for many batch items (`BlockTimes.counts`)."""
    (few, many), forwards = times.counts, []
    for short, long in times.seconds:
        item = max(0.0, long - short) / (many - few)
        forwards.append(ForwardTime(max(0.0, short - few * item), item or short))
    return tuple(forwards)


def share_batch(forwards: Sequence[ForwardTime], plan: ResolvedPlan) -> ResolvedPlan:
    """Return the plan with its batch split by the speed of the slowest rank that computes each part."""
    slowest = [0.0] * plan.data
    for rank, time in enumerate(forwards[: plan.world_size]):
        part = plan.coordinates(rank).data
        slowest[part] = max(slowest[part], time.item)
    if max(slowest) < EQUAL_SPEED * min(slowest):
        return plan
    shares = tuple(max(1, round(FASTEST * min(slowest) / seconds)) for seconds in slowest)
    return msgspec.structs.replace(plan, batch_shares=shares)


def share_by(paces: Sequence[float], plan: ResolvedPlan) -> ResolvedPlan:
    """Return the plan with its tokens cut by speed.

    All branches, stages and parts of the batch are cut in the same way. So the share of a sequence rank suits the slowest of
    the world ranks at this position.

    Args:
        paces: every rank's speed, in any unit.
        plan: the plan.
    """
    ranks = len(plan.shares)
    slowest = [min(paces[rank::ranks]) for rank in range(ranks)]
    if max(slowest) < EQUAL_SPEED * min(slowest):
        return plan
    shares = tuple(max(1, round(FASTEST * pace / max(slowest))) for pace in slowest)
    return msgspec.structs.replace(plan, shares=shares)


def share_by_memory(plan: ResolvedPlan, model: ModelShape, job: DenoiseJob, profile: Profile) -> ResolvedPlan:
    """Return the plan with tokens moved from ranks that lack memory for them to the ranks with the most free memory.

    The plan is unchanged if all ranks have enough memory, or if moving tokens does not help. Moving tokens does not change
    the weights that a rank holds.
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
