"""The time that a rank waits: by the clock on a CPU, by its stream on a GPU, where nothing blocks the host."""

from __future__ import annotations

import time

import pytest
import torch

from parallel_backend.comm.device_events import DeviceEvents
from parallel_backend.comm.meter import Meter

SECONDS = 0.05


def test_waiting_is_what_blocks_and_nothing_else() -> None:
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
def test_a_stream_that_waits_for_another_is_counted_though_the_host_goes_on() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    meter, other = Meter(device=device), torch.cuda.Stream(device)
    torch.cuda._sleep(1)  # its kernel is loaded
    torch.cuda.synchronize(device)
    meter.reset()
    started = time.perf_counter()
    with torch.cuda.stream(other):
        torch.cuda._sleep(200_000_000)  # as NCCL would be busy
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


def test_moments_are_seconds_from_the_first_and_are_forgotten_once_taken() -> None:
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
def test_moments_of_a_gpu_are_when_it_gets_there() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    moments = DeviceEvents(device)
    torch.cuda._sleep(1)  # its kernel is loaded
    started = time.perf_counter()
    moments.record()
    torch.cuda._sleep(200_000_000)
    moments.record()
    on_host = time.perf_counter() - started
    assert moments.pop_seconds()[1] > 2 * on_host
