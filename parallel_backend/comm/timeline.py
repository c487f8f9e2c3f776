"""Timeline: when a rank waited for other ranks during a request, in a fixed number of bins."""

from __future__ import annotations

import time

BINS = 256
"""The number of bins."""

INITIAL_WIDTH = 1 / 1024
"""Seconds of a bin at the start. The width doubles when a request needs more, so bins of several ranks fit together."""


class Timeline:
    """Seconds waited in each bin, by kind of traffic, from now on.

    Attributes:
        begun: the start, by `time.perf_counter`.
        width: seconds of a bin.
        waiting: for each kind of traffic the seconds waited in each bin.
    """

    def __init__(self) -> None:
        self.begun = time.perf_counter()
        self.width = INITIAL_WIDTH
        self.waiting: dict[str, list[float]] = {}

    def add(self, kind: str, begin: float, end: float) -> None:
        """Add a wait from `begin` to `end` (by `time.perf_counter`) to the bins that it overlaps."""
        begin, end = max(0.0, begin - self.begun), max(0.0, end - self.begun)
        while end >= BINS * self.width:
            self.width *= 2
            self.waiting = {name: merge_pairs(bins) for name, bins in self.waiting.items()}
        bins = self.waiting.setdefault(kind, [0.0] * BINS)
        first, last = int(begin / self.width), int(end / self.width)
        if first == last:
            bins[first] += end - begin
            return
        bins[first] += (first + 1) * self.width - begin
        for index in range(first + 1, last):
            bins[index] = self.width
        bins[last] += end - last * self.width


def merge_pairs(bins: list[float]) -> list[float]:
    """Return the same number of bins of twice the width; the second half is empty."""
    return [bins[index] + bins[index + 1] for index in range(0, len(bins), 2)] + [0.0] * (len(bins) // 2)
