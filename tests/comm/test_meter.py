"""The time that a rank waits: by the clock on a CPU, by its stream on a GPU, where nothing blocks the host; and its timeline."""

from __future__ import annotations

import time

import pytest
import torch

from parallel_backend.comm.device_events import DeviceEvents
from parallel_backend.comm.meter import BINS, INITIAL_WIDTH, Meter, Timeline

SECONDS = 0.05


def test_only_time_in_wait_counts_as_waiting_until_a_reset_and_stays_on_the_timeline_until_a_request() -> None:
    meter = Meter()
    started = time.perf_counter()
    for _ in range(2):
        time.sleep(SECONDS)
        with meter.wait("ulysses"):
            time.sleep(SECONDS)
    assert 2 * SECONDS <= meter.waiting_seconds() <= time.perf_counter() - started - 2 * SECONDS
    meter.reset()  # as before a denoise
    assert meter.waiting_seconds() == 0
    assert sum(meter.timeline.waiting["ulysses"]) >= 2 * SECONDS
    meter.begin_request()
    assert meter.timeline.waiting == {}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_wait_of_a_stream_counts_although_the_host_continues() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    meter, other = Meter(device=device), torch.cuda.Stream(device)
    torch.cuda._sleep(1)  # loads its kernel
    torch.cuda.synchronize(device)
    meter.reset()
    started = time.perf_counter()
    with torch.cuda.stream(other):
        torch.cuda._sleep(200_000_000)  # stands for a busy NCCL
    with meter.wait("ulysses"):
        torch.cuda.current_stream(device).wait_stream(other)
    on_host = time.perf_counter() - started
    assert meter.waiting_seconds() > 2 * on_host
    waited, timeline = meter.waiting_seconds(), meter.timeline
    assert sum(timeline.waiting["ulysses"]) == pytest.approx(waited)
    since = round((started - timeline.begun) / timeline.width)
    assert (
        sum(timeline.waiting["ulysses"][: max(0, since - 1)]) == 0
    )  # it is where it was, not where the host was asked


def test_recorded_events_are_seconds_from_the_first_and_are_cleared_when_read() -> None:
    moments = DeviceEvents(torch.device("cpu"))
    for _ in range(2):
        assert moments.pop_seconds() == []
        for _ in range(3):
            moments.record()
            time.sleep(SECONDS)
        first, second, third = moments.pop_seconds()
        assert first == 0
        assert second >= SECONDS and third - second >= SECONDS


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_events_of_a_gpu_have_the_time_when_the_gpu_reaches_them() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    moments = DeviceEvents(device)
    torch.cuda._sleep(1)  # loads its kernel
    started = time.perf_counter()
    moments.record()
    torch.cuda._sleep(200_000_000)
    moments.record()
    on_host = time.perf_counter() - started
    assert moments.pop_seconds()[1] > 2 * on_host


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
