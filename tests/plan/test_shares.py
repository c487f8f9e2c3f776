"""Tokens are shared by the speed of ranks, and plans are judged with these shares."""

from __future__ import annotations

import dataclasses

import msgspec
import pytest

from parallel_backend.plan.predict.cost import cost, needs
from parallel_backend.plan.predict.known_machines import profile
from parallel_backend.plan.predict.measure import BlockTimes
from parallel_backend.plan.split import paces_by, share_by
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
