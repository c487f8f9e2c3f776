"""The per-run report: what each rank computed, waited for, sent and held."""

from __future__ import annotations

from collections.abc import Sequence

from ..wire.messages import Report

MEBIBYTE = 1 << 20


def table(reports: Sequence[Report], devices: Sequence[str]) -> str:
    """One line a rank, for the log."""
    lines = [
        f"{'rank':>4}  {'device':<8} {'compute':>9} {'waiting':>9} {'weights':>10} {'cache':>10} {'peak':>10}  sent"
    ]
    for report in sorted(reports, key=lambda report: report.rank):
        sent = ", ".join(f"{kind} {_mebibytes(count)}" for kind, count in sorted(report.sent.items()) if count)
        lines.append(
            f"{report.rank:>4}  {devices[report.rank]:<8} {report.seconds - report.waiting:>7.2f} s {report.waiting:>7.2f} s "
            f"{_mebibytes(report.weights):>10} {_mebibytes(report.cache):>10} {_mebibytes(report.peak):>10}  {sent or '-'}"
        )
    return "\n".join(lines)


def _mebibytes(count: int) -> str:
    return f"{count / MEBIBYTE:.1f} MiB"
