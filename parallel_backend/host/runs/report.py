"""The report of each run for the log: the time that each rank computed and waited, and the bytes that it sent and held."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ...diffusion import ModelSpec
from ...wire.to_host import RankCostReply

MEBIBYTE = 1 << 20


def table(reports: Sequence[RankCostReply], devices: Sequence[str]) -> str:
    """Return a table for the log, with one line for each rank."""
    lines = [
        f"{'rank':>4}  {'device':<8} {'compute':>9} {'waiting':>9} {'weights':>10} {'cache':>10} {'peak':>10} {'read':>10}  sent"
    ]
    for report in sorted(reports, key=lambda report: report.rank):
        sent = ", ".join(f"{kind} {_mebibytes(count)}" for kind, count in sorted(report.sent.items()) if count)
        lines.append(
            f"{report.rank:>4}  {devices[report.rank]:<8} {report.seconds - report.waiting:>7.2f} s {report.waiting:>7.2f} s "
            f"{_mebibytes(report.weights):>10} {_mebibytes(report.cache):>10} {_mebibytes(report.peak):>10} "
            f"{_mebibytes(report.read):>10}  {sent or '-'}"
        )
    return "\n".join(lines)


def compiled(reports: Sequence[RankCostReply]) -> str:
    """Return the time that compiling took on the slowest rank, in words, or an empty string if nothing was compiled."""
    seconds = max(report.compiling for report in reports)
    return f"blocks compiled in {seconds:.1f} s; the compiled code is cached for later starts" if seconds else ""


def restored(model: ModelSpec, reports: Sequence[RankCostReply]) -> str:
    """Return the bytes that came back from host memory before a run, in words, or an empty string if there are none."""
    count = sum(report.restored for report in reports)
    return f"{Path(model.path).name}: {_mebibytes(count)} restored from host memory" if count else ""


def released(model: ModelSpec, reports: Sequence[RankCostReply]) -> str:
    """Describe the memory that the workers use after a model has left their devices."""
    on_device = sum(entry.nbytes for report in reports for entry in report.models_on_device)
    on_host = sum(report.on_host for report in reports)
    return (
        f"{Path(model.path).name} released; the workers now use {_mebibytes(on_device)} on their devices and "
        f"{_mebibytes(on_host)} of host memory"
    )


def _mebibytes(count: int) -> str:
    return f"{count / MEBIBYTE:.1f} MiB"
