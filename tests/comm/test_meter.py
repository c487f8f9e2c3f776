"""The time that a rank waits: by the clock on a CPU, by its stream on a GPU, where nothing blocks the host."""

from __future__ import annotations

import time

import pytest
import torch

from parallel_backend.comm.device_events import DeviceEvents
from parallel_backend.comm.meter import Meter

SECONDS = 0.05


def test_only_time_in_wait_counts_as_waiting() -> None:
    meter = Meter()
    started = time.perf_counter()
    for _ in range(2):
        time.sleep(SECONDS)
        with meter.wait("ulysses"):
            time.sleep(SECONDS)
    assert 2 * SECONDS <= meter.waiting_seconds() <= time.perf_counter() - started - 2 * SECONDS
    meter.reset()
    assert meter.waiting_seconds() == 0


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
