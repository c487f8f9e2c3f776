"""Tokens and stages are cut by the speed of ranks and the cost of blocks, and plans are judged with these cuts."""

from __future__ import annotations

import dataclasses
from itertools import accumulate, combinations, pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallel_backend.plan.predict.cost import cost
from parallel_backend.plan.predict.known_machines import profile
from parallel_backend.plan.predict.measure import BlockTimes
from parallel_backend.plan.predict.memory import needs
from parallel_backend.plan.split import cut_by_cost, cut_by_time, paces_by, share_by
from tests.plan.jobs import FLUX, JOB
from tests.support.plans import cpu_plan


def test_a_pace_covers_all_blocks_in_units_of_the_slowest_rank():
    times = BlockTimes(((1.0, 1.0), (2.0, 2.0), (1.0, 2.5)), (19, 38))
    assert paces_by(times) == pytest.approx((2.0, 1.0, 2.0 * 57 / (19 + 2.5 * 38)))


@pytest.mark.parametrize(
    ("degrees", "paces", "shares"),
    [
        ({"ulysses": 2}, (2.0, 1.0), (100, 50)),
        ({"ring": 3}, (1.0, 1.56, 1.04), (64, 100, 67)),
        ({"ulysses": 2}, (1.04, 1.0), (1, 1)),  # nearly equal
        ({"cfg": 2, "ulysses": 2}, (2.0, 2.0, 1.0, 1.0), (1, 1)),  # the slow ranks are one branch
        ({"cfg": 2, "ulysses": 2}, (2.0, 1.0, 2.0, 1.5), (100, 50)),
        ({"pipefusion": 2, "ring": 2}, (3.0, 1.0, 3.0, 2.0), (100, 33)),
        ({"cfg": 2}, (2.0, 1.0), (1,)),
    ],
)
def test_a_share_of_tokens_follows_the_slowest_rank_that_computes_it(degrees, paces, shares):
    assert share_by(paces, cpu_plan(**degrees)).shares == shares


def test_a_cut_by_speed_is_predicted_faster_than_an_even_cut_or_one_card():
    even = cpu_plan(ulysses=2, blocks=57)
    paces = (2.0, 1.0)
    machine = dataclasses.replace(profile("h100"), paces=paces)
    seconds = [cost(plan, FLUX, JOB, machine).device for plan in (even, share_by(paces, even), cpu_plan(blocks=57))]
    assert seconds[1] == pytest.approx(seconds[0] * 2 / 3, rel=0.05)
    assert seconds[1] == pytest.approx(seconds[2] * 2 / 3, rel=0.05)


def test_the_rank_with_most_tokens_needs_most_memory():
    even = cpu_plan(ulysses=2, patches=2, blocks=57)
    more = msgspec.structs.replace(even, shares=(100, 50))
    assert needs(more, FLUX, JOB).activations == pytest.approx(needs(even, FLUX, JOB).activations * 4 / 3, rel=0.08)


def roomy(stage: int, first: int, count: int) -> float:
    return 0.0


def largest(costs: list[list[float]], cuts: tuple[int, ...]) -> float:
    ends = [0, *accumulate(cuts)]
    return max(sum(stage[ends[i] : ends[i + 1]]) for i, stage in enumerate(costs))


@given(st.data(), st.integers(1, 4), st.integers(4, 9))
def test_the_fastest_cut_that_fits_is_taken_or_else_the_one_that_lacks_least(
    data: st.DataObject, stages: int, blocks: int
) -> None:
    row = st.lists(st.integers(1, 9).map(float), min_size=blocks, max_size=blocks)
    costs = data.draw(st.lists(row, min_size=stages, max_size=stages))
    enough = st.just([blocks] * stages)
    rooms = data.draw(enough | st.lists(st.integers(1, blocks), min_size=stages, max_size=stages))

    def lack(cuts: tuple[int, ...]) -> int:
        return max(max(0, count - room) for count, room in zip(cuts, rooms, strict=True))

    cuts = cut_by_cost(costs, lambda stage, first, count: max(0, count - rooms[stage]))
    assert sum(cuts) == blocks and min(cuts) >= 1 and len(cuts) == stages
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
    """A stage has ranks in every cfg branch."""
    plan = cpu_plan(pipefusion=2, ulysses=2, blocks=30)
    fast, slow = (1.0,), (2.0,)
    assert [plan.stage_ranks(stage) for stage in range(2)] == [[0, 1], [2, 3]]
    in_branches = cpu_plan(cfg=2, pipefusion=2, ring=2)
    assert [in_branches.stage_ranks(stage) for stage in range(2)] == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert cut_by_time(plan, BlockTimes((fast, slow, fast, fast), (30,)), roomy) == (10, 20)
