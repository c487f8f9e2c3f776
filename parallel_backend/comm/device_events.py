"""DeviceEvents: when a device gets to a place in its work, which is later than when the host asked for it."""

from __future__ import annotations

import time

import torch


class DeviceEvents:
    """Marks in what a device is given to do: events of a GPU's stream, the clock's readings elsewhere."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._clock: list[float] = []
        self._events: list[torch.cuda.Event] = []

    def record(self) -> None:
        """One more; the host does not wait."""
        if self._device.type != "cuda":
            self._clock.append(time.perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        self._events.append(event)

    def take(self) -> list[float]:
        """Seconds from the first mark to each, and the marks are forgotten; waits until the device has got to the last."""
        if self._events:
            first, last = self._events[0], self._events[-1]
            last.synchronize()
            seconds = [first.elapsed_time(event) / 1e3 for event in self._events]
        else:
            seconds = [at - self._clock[0] for at in self._clock]
        self._clock, self._events = [], []
        return seconds
