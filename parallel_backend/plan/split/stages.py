"""Cutting a model's blocks into pipeline stages of equal time that have room for them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from ..plan import ResolvedPlan
from ..predict.cost import Lacking
from ..predict.measure import BlockTimes


def cut_by_time(plan: ResolvedPlan, times: BlockTimes, lacks: Lacking) -> tuple[int, ...]:
    """How many blocks each stage gets so that the slowest stage, on its slowest rank, is as fast as can be.

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
