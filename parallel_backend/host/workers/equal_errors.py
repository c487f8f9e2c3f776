"""Comparison of the FailedReply of all ranks: did one request's data make all of them raise the same error?"""

from __future__ import annotations

from collections.abc import Sequence

from ...errors import Refused, RequestFailed
from ...wire.to_host import FailedReply
from .causes import LOST_PEER, known_cause


def raised_equal_errors(reports: Sequence[FailedReply], ranks: int) -> bool:
    """Return whether the ranks can go on after a failure.

    All of them must have raised an error of the same type at the same point of the request. For each kind of operation, the
    ranks that take part in it must have issued equally many, so that none waits for another one.
    """
    if {report.rank for report in reports} != set(range(ranks)) or len(reports) != ranks:
        return False
    if len({(report.error, report.phase, report.step) for report in reports}) > 1:
        return False
    if any(report.issued is None or LOST_PEER.search(report.reason) for report in reports):
        return False
    counts = {
        (report.rank, operation.name, operation.ranks): operation.count
        for report in reports
        for operation in report.issued or ()
        if operation.count
    }
    return all(
        counts.get((rank, name, members)) == count for (_, name, members), count in counts.items() for rank in members
    )


def request_error(reports: Sequence[FailedReply]) -> Exception:
    """Return the error of a request that failed with the same error on all ranks, which recover."""
    first = min(reports, key=lambda report: report.rank)
    if not first.trace:
        return Refused(first.reason)
    cause, reason = known_cause(first.reason), first.reason.partition("\n")[0].rstrip(".")
    step = f", step {first.step}" if first.step else ""
    workers = f"All {len(reports)} workers" if len(reports) > 1 else "The worker"
    return RequestFailed(
        f"{workers} raised the same error while {first.phase}{step}: {reason}. "
        f"{f'{cause.remedy} ' if cause else ''}Change what the nodes give to the model and queue again; the workers go on."
    )
