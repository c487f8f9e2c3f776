"""The timings of a request on this rank, for its RankCostReply."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

from ...comm.meter import Timeline
from ...wire.to_host import RankTimings

MOST_STEPS = 256
"""Largest number of steps whose starts are sent. A longer run sends none: the page could not show them apart."""

Entered = Sequence[tuple[str, int, float]]


def times(timeline: Timeline, entered: Entered) -> RankTimings:
    """Return a request's timings up to now, with the phases and steps that it entered."""
    seconds = time.perf_counter() - timeline.begun
    steps = [at - timeline.begun for _, step, at in entered if step]
    phases: list[tuple[str, float]] = []
    for phase, _, at in entered:
        if not phases or phases[-1][0] != phase:
            phases.append((phase, at - timeline.begun))
    used = math.ceil(seconds / timeline.width)
    return RankTimings(
        seconds=seconds,
        width=timeline.width,
        waiting={kind: [round(1e6 * in_bin) for in_bin in bins[:used]] for kind, bins in timeline.waiting.items()},
        phases=phases,
        steps=steps if len(steps) <= MOST_STEPS else [],
    )
