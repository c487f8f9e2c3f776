"""DeviceEvents: the times at which a device reaches marks in its work. They are later than the host's launches."""

from __future__ import annotations

import time

import torch


class DeviceEvents:
    """Marks in a device's work: events in a GPU's current stream, or the host's clock for a CPU.

    Args:
        device: the device that does the work.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._clock: list[float] = []
        self._events: list[torch.cuda.Event] = []

    def record(self) -> None:
        """Add a mark. The host does not wait."""
        if self._device.type != "cuda":
            self._clock.append(time.perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        self._events.append(event)

    def pop_seconds(self) -> list[float]:
        """Return the seconds from the first mark to each mark, and remove all marks. Waits until the device reaches the last."""
        if self._events:
            first, last = self._events[0], self._events[-1]
            last.synchronize()
            seconds = [first.elapsed_time(event) / 1e3 for event in self._events]
        else:
            seconds = [at - self._clock[0] for at in self._clock]
        self._clock, self._events = [], []
        return seconds
