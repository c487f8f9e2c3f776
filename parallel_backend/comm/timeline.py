"""When a rank waited for the others during a request, in a bounded number of bins, however long it takes."""

from __future__ import annotations

import time

BINS = 256
FINEST = 1 / 1024
"""Seconds of a bin to begin with; it doubles as often as a request needs, so that bins of several ranks fit together."""


class Timeline:
    """Seconds waited in each bin, by kind of traffic, from now on; times are those of time.perf_counter."""

    def __init__(self) -> None:
        self.begun = time.perf_counter()
        self.width = FINEST
        self.waiting: dict[str, list[float]] = {}

    def add(self, kind: str, begin: float, end: float) -> None:
        """Count a wait in the bins that it touches."""
        begin, end = max(0.0, begin - self.begun), max(0.0, end - self.begun)
        while end >= BINS * self.width:
            self.width *= 2
            self.waiting = {name: halved(bins) for name, bins in self.waiting.items()}
        bins = self.waiting.setdefault(kind, [0.0] * BINS)
        first, last = int(begin / self.width), int(end / self.width)
        if first == last:
            bins[first] += end - begin
            return
        bins[first] += (first + 1) * self.width - begin
        for between in range(first + 1, last):
            bins[between] = self.width
        bins[last] += end - last * self.width


def halved(bins: list[float]) -> list[float]:
    """As many bins of twice the width; the second half is empty."""
    return [bins[at] + bins[at + 1] for at in range(0, len(bins), 2)] + [0.0] * (len(bins) // 2)
