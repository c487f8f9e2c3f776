"""The ranks' timings of a request on one scale of time, with sending and waiting told apart."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from ...comm.meter import BINS
from ...mesh_axes import CONTROL, MeshAxis
from ...plan import ResolvedPlan
from ...wire.to_host import RankCostReply, RankTimings
from .calls import BETWEEN

ONE_WAY = (MeshAxis.PIPEFUSION, MeshAxis.LATENT_RETURN, MeshAxis.STAGE, CONTROL, BETWEEN)
"""Traffic in which a rank waits until another rank has computed. In all other traffic the ranks of a stage exchange at once."""

Bins = list[float]


class RankTimeline(msgspec.Struct, frozen=True):
    """The timeline of one rank. Time up to `seconds` that is neither waiting nor sending was spent computing.

    Attributes:
        seconds: the time at which the rank was done.
        phases: the phases with their beginnings.
        waiting: the thousandths of each bin in which the rank waited for other ranks.
        sending: the thousandths of each bin in which the rank sent.
    """

    rank: int
    device: str
    seconds: float
    phases: list[tuple[str, float]]
    waiting: list[int]
    sending: list[int]


class RunTimeline(msgspec.Struct, frozen=True):
    """The timelines of all ranks.

    Attributes:
        width: seconds of a bin.
        steps: the beginnings of the denoise's steps on the first rank, or of the model calls.
    """

    width: float
    bins: int
    steps: list[float]
    ranks: list[RankTimeline]


def timeline_of(plan: ResolvedPlan, reports: Sequence[RankCostReply]) -> RunTimeline:
    """Return the timeline of a finished request.

    In an exchange all ranks of a stage send and receive at once, and all are done at once. The rank that comes last does not
    wait. So the least time that any rank spends on the exchange in a bin counts as sending. The further time of the others is
    waiting.

    Args:
        reports: reports of ranks of the plan, at least one.
    """
    ordered = sorted(reports, key=lambda report: report.rank)
    longest = max(report.times.seconds for report in ordered)
    width = max(report.times.width for report in ordered)
    while width * BINS < longest:
        width *= 2
    bins = math.ceil(longest / width)
    spent = {report.rank: _rebinned(report.times, width, bins) for report in ordered}
    ranks = []
    for report in ordered:
        stage = plan.coordinates(report.rank).pipefusion
        peers = [spent[neighbour] for neighbour in spent if plan.coordinates(neighbour).pipefusion == stage]
        sending = [0.0] * bins
        for kind in spent[report.rank]:
            if kind not in ONE_WAY and len(peers) > 1:
                least = [min(in_bin) for in_bin in zip(*(peer.get(kind, [0.0] * bins) for peer in peers), strict=True)]
                sending = [a + b for a, b in zip(sending, least, strict=True)]
        total = [sum(in_bin) for in_bin in zip([0.0] * bins, *spent[report.rank].values(), strict=True)]
        waiting = [a - b for a, b in zip(total, sending, strict=True)]
        ranks.append(
            RankTimeline(
                rank=report.rank,
                device=plan.devices[report.rank],
                seconds=report.times.seconds,
                phases=report.times.phases,
                waiting=_thousandths(waiting, width),
                sending=_thousandths(sending, width),
            )
        )
    return RunTimeline(width, bins, ordered[0].times.steps, ranks)


def _rebinned(times: RankTimings, width: float, bins: int) -> dict[str, Bins]:
    """Return a rank's seconds in bins of another width: a power of two times the original width."""
    factor = round(width / times.width)
    by_kind = {}
    for kind, spent in times.waiting.items():
        sums = [sum(spent[at : at + factor]) / 1e6 for at in range(0, len(spent), factor)]
        by_kind[kind] = sums + [0.0] * (bins - len(sums))
    return by_kind


def _thousandths(bins: Bins, width: float) -> list[int]:
    return [max(0, min(1000, round(1000 * seconds / width))) for seconds in bins]
