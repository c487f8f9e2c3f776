"""The model calls of one run, asked for one at a time, on one scale of time."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from ..comm.timeline import BINS
from ..wire.messages import Report, Times

PIECES = 16
"""Of a call's bins at most so many are kept: of a run of many calls no more could be seen."""

BETWEEN = "between calls"
"""The kind of waiting from one call's end to the next one's beginning, while ComfyUI's sampler computes."""


@dataclass
class Calls:
    """The calls of one run so far, each with when it began by the clock of `time.monotonic`."""

    _told: list[tuple[float, list[Report]]] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self._told)

    def add(self, reports: Sequence[Report]) -> None:
        """Note a call that has just ended."""
        longest = max(report.times.seconds for report in reports)
        kept = [msgspec.structs.replace(report, times=coarse(report.times)) for report in reports]
        self._told.append((time.monotonic() - longest, kept))

    def reports(self) -> list[Report]:
        """One for each rank, as if the calls had been one request; `seconds` leaves out what is between them."""
        (began, first), *others = self._told[:]  # another thread may add one
        ranks = {report.rank: report for report in first}
        for at, reports in others:
            ranks = {report.rank: joined(ranks[report.rank], report, at - began) for report in reports}
        return list(ranks.values())


def joined(before: Report, after: Report, start: float) -> Report:
    """The report of a call and of the one that began `start` seconds after it."""
    kinds = before.sent.keys() | after.sent.keys()
    return msgspec.structs.replace(
        after,
        seconds=before.seconds + after.seconds,
        waiting=before.waiting + after.waiting,
        sent={kind: before.sent.get(kind, 0) + after.sent.get(kind, 0) for kind in kinds},
        read=before.read + after.read,
        peak=max(before.peak, after.peak),
        times=_joined(before.times, after.times, max(start, before.times.seconds)),
    )


def coarse(times: Times) -> Times:
    """The same in PIECES bins at most."""
    together = 1
    while times.seconds > PIECES * together * times.width:
        together *= 2
    waiting = {
        kind: [sum(bins[at : at + together]) for at in range(0, len(bins), together)]
        for kind, bins in times.waiting.items()
    }
    return msgspec.structs.replace(times, width=together * times.width, waiting=waiting)


def _joined(before: Times, after: Times, start: float) -> Times:
    seconds = start + after.seconds
    width = max(before.width, after.width)
    while width * BINS < seconds:
        width *= 2
    waiting: dict[str, list[float]] = {}
    for kind, bins in before.waiting.items():
        for at, value in enumerate(bins):
            end = min(before.seconds, (at + 1) * before.width)
            _spread(waiting, kind, at * before.width, end, value, width)
    for kind, bins in after.waiting.items():
        for at, value in enumerate(bins):
            end = min(after.seconds, (at + 1) * after.width)
            _spread(waiting, kind, start + at * after.width, start + end, value, width)
    gap = start - before.seconds
    _spread(waiting, BETWEEN, before.seconds, start, 1e6 * gap, width)
    last = before.phases[-1][0] if before.phases else ""
    begun = [(name, start + at) for name, at in after.phases]
    return Times(
        seconds=seconds,
        width=width,
        waiting={kind: [round(value) for value in bins] for kind, bins in waiting.items()},
        phases=[*before.phases, *(begun[1:] if begun and begun[0][0] == last else begun)],
        steps=[*(before.steps or [0.0]), start],
    )


def _spread(waiting: dict[str, list[float]], kind: str, begin: float, end: float, value: float, width: float) -> None:
    """Share a value among the bins from a moment to another, by what of it is in each."""
    if not value or end <= begin:
        return
    bins = waiting.setdefault(kind, [])
    stop = math.ceil(end / width)
    bins.extend([0.0] * (stop - len(bins)))
    for at in range(int(begin / width), stop):
        inside = max(0.0, min(end, (at + 1) * width) - max(begin, at * width))
        bins[at] += value * inside / (end - begin)
