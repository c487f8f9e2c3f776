"""The ranks' timelines on one scale: the time spent sending and waiting, and ranks with bins of other widths."""

from __future__ import annotations

import pytest

from parallel_backend.host.runs.calls import BETWEEN, Calls, coarse, joined
from parallel_backend.host.runs.timeline import timeline_of
from parallel_backend.wire.to_host import RankCostReply, RankTimings
from tests.support.plans import cpu_plan


def report(rank: int, seconds: float, width: float, waiting: dict[str, list[int]]) -> RankCostReply:
    times = RankTimings(seconds, width, waiting, [("sampling", 0.0)], [0.0, 0.5])
    nothing = dict.fromkeys(("read", "weights", "cache", "peak", "on_host", "restored"), 0)
    return RankCostReply(
        request=1, rank=rank, seconds=seconds, waiting=0.0, sent={}, models_on_device=[], times=times, **nothing
    )


def test_the_shortest_time_of_an_exchange_is_sending_and_the_rest_is_waiting() -> None:
    reports = [
        report(1, 1.0, 0.25, {"ulysses": [100_000, 0, 250_000, 50_000]}),
        report(0, 0.9, 0.125, {"ulysses": [10_000, 30_000, 0, 20_000, 125_000, 125_000, 0, 0]}),
    ]
    timeline = timeline_of(cpu_plan(ulysses=2), reports)
    assert (timeline.width, timeline.bins, timeline.steps) == (0.25, 4, [0.0, 0.5])
    first, second = timeline.ranks
    assert (first.rank, first.sending, first.waiting) == (0, [160, 0, 1000, 0], [0, 80, 0, 0])
    assert (second.rank, second.sending, second.waiting) == (1, [160, 0, 1000, 0], [240, 0, 0, 200])


def test_a_wait_for_another_stage_is_waiting_and_ranks_are_compared_within_a_stage() -> None:
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


def test_successive_calls_join_to_one_timeline_with_gaps_as_waiting() -> None:
    first = [
        report(0, 1.0, 0.25, {"ulysses": [0, 0, 0, 100_000]}),
        report(1, 1.0, 0.25, {"ulysses": [0, 0, 0, 50_000]}),
    ]
    second = [report(0, 0.5, 0.25, {"ulysses": [20_000, 0]}), report(1, 0.5, 0.25, {"ulysses": [20_000, 0]})]
    both = [joined([(0.0, before), (1.5, after)]) for before, after in zip(first, second, strict=True)]
    assert [(each.seconds, each.times.seconds, each.times.steps[-1]) for each in both] == [(1.5, 2.0, 1.5)] * 2
    timeline = timeline_of(cpu_plan(ulysses=2), both)
    assert (timeline.width, timeline.bins) == (0.25, 8)
    assert [rank.sending for rank in timeline.ranks] == [[0, 0, 0, 200, 0, 0, 80, 0]] * 2
    assert [rank.waiting for rank in timeline.ranks] == [
        [0, 0, 0, 200, 1000, 1000, 0, 0],
        [0, 0, 0, 0, 1000, 1000, 0, 0],
    ]
    assert all(rank.phases == [("sampling", 0.0)] for rank in timeline.ranks)


def test_joining_many_calls_keeps_the_total_times() -> None:
    call = report(0, 3.0, 0.0078125, {"ulysses": [300] * 384})
    whole = joined([(number * 3.25, call) for number in range(41)])
    assert whole.times.seconds == pytest.approx(41 * 3 + 40 * 0.25)
    assert len(whole.times.steps) == 41
    assert sum(whole.times.waiting["ulysses"]) == pytest.approx(41 * 384 * 300, rel=1e-3)
    assert sum(whole.times.waiting[BETWEEN]) == pytest.approx(40 * 250_000, rel=1e-3)
    assert len(timeline_of(cpu_plan(ulysses=1), [whole]).ranks[0].waiting) <= 256


def test_a_call_keeps_at_most_sixteen_bins() -> None:
    kept = coarse(report(0, 1.0, 0.0078125, {"ulysses": list(range(128))}).times)
    assert (kept.width, len(kept.waiting["ulysses"])) == (0.0625, 16)
    assert kept.waiting["ulysses"][0] == sum(range(8))
    calls = Calls()
    for _ in range(3):
        calls.add([report(1, 0.5, 0.25, {}), report(0, 0.5, 0.25, {})])
    assert [(each.rank, each.seconds) for each in calls.reports()] == [(1, 1.5), (0, 1.5)]
    assert len(calls) == 3
