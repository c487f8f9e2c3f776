"""The ranks' timelines on one scale: what is sending, what is waiting, and what a rank with other bins told."""

from __future__ import annotations

import pytest

from parallel_backend.host.timeline import timeline_of
from parallel_backend.wire.messages import Report, Times
from tests.plans import cpu_plan


def report(rank: int, seconds: float, width: float, waiting: dict[str, list[int]]) -> Report:
    times = Times(seconds, width, waiting, [("sampling", 0.0)], [0.0, 0.5])
    nothing = dict.fromkeys(("read", "weights", "cache", "peak", "on_host", "restored"), 0)
    return Report(request=1, rank=rank, seconds=seconds, waiting=0.0, sent={}, held=[], times=times, **nothing)


def test_the_least_that_any_rank_spent_on_an_exchange_is_sending_and_the_rest_is_waiting() -> None:
    reports = [
        report(1, 1.0, 0.25, {"ulysses": [100_000, 0, 250_000, 50_000]}),
        report(0, 0.9, 0.125, {"ulysses": [10_000, 30_000, 0, 20_000, 125_000, 125_000, 0, 0]}),
    ]
    timeline = timeline_of(cpu_plan(ulysses=2), reports)
    assert (timeline.width, timeline.bins, timeline.steps) == (0.25, 4, [0.0, 0.5])
    first, second = timeline.ranks
    assert (first.rank, first.sending, first.waiting) == (0, [160, 0, 1000, 0], [0, 80, 0, 0])
    assert (second.rank, second.sending, second.waiting) == (1, [160, 0, 1000, 0], [240, 0, 0, 200])


def test_a_stage_that_waits_for_another_waits_and_is_compared_with_its_own_stage_alone() -> None:
    reports = [
        report(0, 1.0, 0.5, {"ulysses": [100_000, 100_000]}),
        report(1, 1.0, 0.5, {"ulysses": [100_000, 100_000]}),
        report(2, 1.0, 0.5, {"pipefusion": [500_000, 0], "ulysses": [0, 50_000]}),
        report(3, 1.0, 0.5, {"pipefusion": [500_000, 0], "ulysses": [0, 250_000]}),
    ]
    ranks = timeline_of(cpu_plan(pipefusion=2, ulysses=2), reports).ranks
    assert [rank.sending for rank in ranks] == [[200, 200], [200, 200], [0, 100], [0, 100]]
    assert [rank.waiting for rank in ranks] == [[0, 0], [0, 0], [1000, 0], [1000, 400]]


def test_bins_fit_the_slowest_rank() -> None:
    timeline = timeline_of(cpu_plan(ulysses=2), [report(0, 300.0, 1.0, {}), report(1, 200.0, 1.0, {})])
    assert timeline.width == 2.0
    assert timeline.bins == pytest.approx(150)
    assert all(len(rank.waiting) == timeline.bins for rank in timeline.ranks)
