"""A rank's waits by the time at which they took place, however long a request takes."""

from __future__ import annotations

import time

import pytest

from parallel_backend.comm.meter import BINS, INITIAL_WIDTH, Meter, Timeline


def seconds(timeline: Timeline, kind: str, begin: float, end: float) -> float:
    """Return the seconds waited between two times, which must be edges of bins."""
    first, last = round(begin / timeline.width), round(end / timeline.width)
    return sum(timeline.waiting[kind][first:last])


def test_waits_stay_at_their_times_after_bins_have_grown() -> None:
    timeline = Timeline()
    start = timeline.begun
    short = INITIAL_WIDTH / 4
    for at in range(100):
        timeline.add("ring", start + at * INITIAL_WIDTH + short, start + at * INITIAL_WIDTH + 2 * short)
    timeline.add("ulysses", start + 10.0, start + 30.5)  # spans many bins
    assert timeline.width * BINS > 30.5
    assert timeline.width == 128 * INITIAL_WIDTH
    assert len(timeline.waiting["ring"]) == len(timeline.waiting["ulysses"]) == BINS
    assert sum(timeline.waiting["ring"]) == pytest.approx(100 * short)
    assert sum(timeline.waiting["ulysses"]) == pytest.approx(20.5)
    assert seconds(timeline, "ulysses", 0, 10) == pytest.approx(0, abs=1e-6)
    assert seconds(timeline, "ulysses", 10, 20) == pytest.approx(10)
    assert seconds(timeline, "ring", 0, 128 * INITIAL_WIDTH) == pytest.approx(100 * short)
    assert max(timeline.waiting["ulysses"]) <= timeline.width + 1e-9


def test_a_request_begins_a_new_timeline_and_a_reset_only_a_new_sum() -> None:
    meter = Meter()
    with meter.wait("loading"):
        time.sleep(0.01)
    meter.reset()  # as before a denoise: earlier waits stay on the timeline, and leave the sum
    assert meter.waiting_seconds() == 0
    assert sum(meter.timeline.waiting["loading"]) >= 0.01
    meter.begin_request()
    assert meter.timeline.waiting == {}
