"""Cutting a model's blocks into pipeline stages of equal time."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from .measure import BlockTimes
from .plan import ResolvedPlan


def cut_by_time(plan: ResolvedPlan, times: BlockTimes) -> tuple[int, ...]:
    """How many blocks each stage gets so that the slowest stage, on its slowest rank, is as fast as can be."""
    return cut_by_cost([_block_seconds(times, ranks) for ranks in stage_ranks(plan)])


def stage_ranks(plan: ResolvedPlan) -> list[list[int]]:
    """The world ranks of each stage."""
    stages = range(plan.pipefusion)
    return [[rank for rank in range(plan.world_size) if plan.place(rank).pipefusion == stage] for stage in stages]


def cut_by_cost(costs: Sequence[Sequence[float]]) -> tuple[int, ...]:
    """Contiguous runs of blocks, at least one each, whose largest cost is least; among those, whose squares are.

    Args:
        costs: what each block would cost on each stage, `[stage][block]`.
    """
    sums = [[0.0, *accumulate(stage)] for stage in costs]
    blocks = len(costs[0])
    assert len(costs) <= blocks
    # best[stop]: the least (largest cost, sum of squares) of the stages so far over blocks up to `stop`, and their cuts
    best: dict[int, tuple[float, float, tuple[int, ...]]] = {0: (0.0, 0.0, ())}
    for stage, total in enumerate(sums):
        left = len(costs) - stage - 1
        ways: dict[int, tuple[float, float, tuple[int, ...]]] = {}
        for start, (largest, squares, cuts) in best.items():
            for stop in range(start + 1, blocks - left + 1):
                seconds = total[stop] - total[start]
                way = (max(largest, seconds), squares + seconds**2, (*cuts, stop - start))
                ways[stop] = min(ways.get(stop, way), way)
        best = ways
    return best[blocks][2]


def _block_seconds(times: BlockTimes, ranks: Sequence[int]) -> list[float]:
    kinds = range(len(times.counts))
    slowest = [max(times.seconds[rank][kind] for rank in ranks) for kind in kinds]
    return [slowest[kind] for kind in kinds for _ in range(times.counts[kind])]
