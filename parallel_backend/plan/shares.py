"""How the tokens are shared among ranks whose devices are not equally fast, so that none waits for another."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from .measure import BlockTimes
from .plan import ResolvedPlan

FASTEST = 100
"""The share of the fastest rank."""

ALIKE = 1.05
"""Ranks whose speeds differ by less than this factor, which measuring cannot tell apart, are given the same."""


def paces_by(times: BlockTimes) -> tuple[float, ...]:
    """Each rank's speed over a model's blocks, in units of the slowest's."""
    seconds = [sum(count * one for count, one in zip(times.counts, own, strict=True)) for own in times.seconds]
    return tuple(max(seconds) / own for own in seconds)


def share_by(paces: Sequence[float], plan: ResolvedPlan) -> ResolvedPlan:
    """The plan with its tokens cut by speed.

    A place among the sequence ranks gets what suits the slowest of the ranks there, since all branches, stages and parts of
    the batch are cut alike.

    Args:
        paces: every rank's speed, in any unit.
    """
    places = len(plan.shares)
    slowest = [min(paces[place::places]) for place in range(places)]
    if max(slowest) < ALIKE * min(slowest):
        return plan
    shares = tuple(max(1, round(FASTEST * pace / max(slowest))) for pace in slowest)
    return msgspec.structs.replace(plan, shares=shares)
