"""The model calls of one run that are requested one at a time, on one scale of time."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from ...comm.meter import BINS
from ...wire.to_host import RankCostReply, RankTimings

MOST_BINS = 16
"""Largest number of a call's bins that are kept. In a run of many calls, more bins could not be seen."""

BETWEEN = "between calls"
"""Kind of waiting from one call's end to the next one's beginning, while ComfyUI's sampler computes."""


@dataclass
class Calls:
    """The calls of one run so far, each with its start by the clock of `time.monotonic`."""

    _calls: list[tuple[float, list[RankCostReply]]] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self._calls)

    def add(self, reports: Sequence[RankCostReply]) -> None:
        """Add a call that has just ended."""
        longest = max(report.times.seconds for report in reports)
        coarse_reports = [msgspec.structs.replace(report, times=coarse(report.times)) for report in reports]
        self._calls.append((time.monotonic() - longest, coarse_reports))

    def reports(self) -> list[RankCostReply]:
        """Return one report for each rank, as if the calls had been one request.

        `seconds` leaves out the time between calls.
        """
        calls = self._calls[:]  # another thread may add one
        ranks: dict[int, list[tuple[float, RankCostReply]]] = {}
        for began, reports in calls:
            for report in reports:
                ranks.setdefault(report.rank, []).append((began - calls[0][0], report))
        return [joined(calls) for calls in ranks.values()]


def joined(calls: Sequence[tuple[float, RankCostReply]]) -> RankCostReply:
    """Join one rank's reports of calls into one report.

    Args:
        calls: each report, with the seconds from the first call's beginning to the beginning of its own call.
    """
    reports = [report for _, report in calls]
    sent: dict[str, int] = {}
    for report in reports:
        for kind, count in report.sent.items():
            sent[kind] = sent.get(kind, 0) + count
    return msgspec.structs.replace(
        reports[-1],
        seconds=sum(report.seconds for report in reports),
        waiting=sum(report.waiting for report in reports),
        sent=sent,
        read=sum(report.read for report in reports),
        peak=max(report.peak for report in reports),
        times=_joined([(start, report.times) for start, report in calls]),
    )


def coarse(times: RankTimings) -> RankTimings:
    """Return the timeline with its bins joined into MOST_BINS bins at most."""
    factor = 1
    while times.seconds > MOST_BINS * factor * times.width:
        factor *= 2
    waiting = {
        kind: [sum(bins[at : at + factor]) for at in range(0, len(bins), factor)]
        for kind, bins in times.waiting.items()
    }
    return msgspec.structs.replace(times, width=factor * times.width, waiting=waiting)


def _joined(calls: Sequence[tuple[float, RankTimings]]) -> RankTimings:
    starts: list[float] = []
    seconds = 0.0
    for start, times in calls:  # by another clock, so a call may seem to begin before the last one has ended
        starts.append(max(start, seconds))
        seconds = starts[-1] + times.seconds
    width = max(times.width for _, times in calls)
    while width * BINS < seconds:
        width *= 2
    waiting: dict[str, list[float]] = {}
    phases: list[tuple[str, float]] = []
    ended = 0.0
    for start, (_, times) in zip(starts, calls, strict=True):
        _spread(waiting, BETWEEN, ended, start, 1e6 * (start - ended), width)
        ended = start + times.seconds
        for kind, bins in times.waiting.items():
            for at, value in enumerate(bins):
                end = min(times.seconds, (at + 1) * times.width)
                _spread(waiting, kind, start + at * times.width, start + end, value, width)
        phases += [(name, start + at) for name, at in times.phases if not phases or phases[-1][0] != name]
    return RankTimings(
        seconds=seconds,
        width=width,
        waiting={kind: [round(value) for value in bins] for kind, bins in waiting.items()},
        phases=phases,
        steps=starts,
    )


def _spread(waiting: dict[str, list[float]], kind: str, begin: float, end: float, value: float, width: float) -> None:
    """Share a value among the bins from one moment to another, by the part of the time that lies in each bin."""
    if not value or end <= begin:
        return
    bins = waiting.setdefault(kind, [])
    first, stop = int(begin / width), math.ceil(end / width)
    bins.extend([0.0] * (stop - len(bins)))
    if stop - first == 1:
        bins[first] += value
        return
    for at in range(first, stop):
        inside = max(0.0, min(end, (at + 1) * width) - max(begin, at * width))
        bins[at] += value * inside / (end - begin)
