"""Stages are cut by the cost of blocks, not by their number."""

from __future__ import annotations

from itertools import accumulate, combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallel_backend.plan.predict.measure import BlockTimes
from parallel_backend.plan.split import cut_by_cost, cut_by_time
from tests.support.plans import cpu_plan


def roomy(stage: int, first: int, count: int) -> float:
    return 0.0


def largest(costs: list[list[float]], cuts: tuple[int, ...]) -> float:
    ends = [0, *accumulate(cuts)]
    return max(sum(stage[ends[i] : ends[i + 1]]) for i, stage in enumerate(costs))


@given(st.data(), st.integers(1, 4), st.integers(4, 9))
def test_no_other_cut_has_a_faster_slowest_stage(data: st.DataObject, stages: int, blocks: int) -> None:
    row = st.lists(st.integers(1, 9).map(float), min_size=blocks, max_size=blocks)
    costs = data.draw(st.lists(row, min_size=stages, max_size=stages))
    cuts = cut_by_cost(costs, roomy)
    assert sum(cuts) == blocks and min(cuts) >= 1 and len(cuts) == stages
    every = ((0, *inner, blocks) for inner in combinations(range(1, blocks), stages - 1))
    ways = [tuple(b - a for a, b in pairwise(ends)) for ends in every]
    assert largest(costs, cuts) == min(largest(costs, way) for way in ways)


@given(st.data(), st.integers(1, 4), st.integers(4, 9))
def test_the_fastest_cut_that_fits_is_taken_or_else_the_one_that_lacks_least(
    data: st.DataObject, stages: int, blocks: int
) -> None:
    row = st.lists(st.integers(1, 9).map(float), min_size=blocks, max_size=blocks)
    costs = data.draw(st.lists(row, min_size=stages, max_size=stages))
    rooms = data.draw(st.lists(st.integers(1, blocks), min_size=stages, max_size=stages))

    def lack(cuts: tuple[int, ...]) -> int:
        return max(max(0, count - room) for count, room in zip(cuts, rooms, strict=True))

    cuts = cut_by_cost(costs, lambda stage, first, count: max(0, count - rooms[stage]))
    every = ((0, *inner, blocks) for inner in combinations(range(1, blocks), stages - 1))
    ways = [tuple(b - a for a, b in pairwise(ends)) for ends in every]
    least = min(map(lack, ways))
    assert lack(cuts) == least
    if least == 0:
        assert largest(costs, cuts) == min(largest(costs, way) for way in ways if lack(way) == 0)


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        pytest.param((1.0, 1.0), (29, 28), id="double blocks as fast as single ones"),
        pytest.param((2.0, 1.0), (19, 38), id="double blocks twice as slow"),
    ],
)
def test_a_flux_is_cut_by_the_time_of_its_two_kinds_of_blocks(seconds, expected) -> None:
    plan = cpu_plan(pipefusion=2, blocks=57)
    assert sorted(cut_by_time(plan, BlockTimes((seconds, seconds), (19, 38)), roomy)) == sorted(expected)


def test_a_slow_card_gets_fewer_blocks() -> None:
    plan = cpu_plan(pipefusion=2, ulysses=2, blocks=30)
    fast, slow = (1.0,), (2.0,)
    assert [plan.stage_ranks(stage) for stage in range(2)] == [[0, 1], [2, 3]]
    assert cut_by_time(plan, BlockTimes((fast, slow, fast, fast), (30,)), roomy) == (10, 20)


def test_a_stage_has_ranks_in_every_cfg_branch() -> None:
    plan = cpu_plan(cfg=2, pipefusion=2, ring=2)
    assert [plan.stage_ranks(stage) for stage in range(2)] == [[0, 1, 4, 5], [2, 3, 6, 7]]
