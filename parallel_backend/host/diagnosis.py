"""From what is known of a failed group to the sentence the user sees: the earliest cause, and what to do."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence

from ..errors import WorkerFailed, WorkerOutOfMemory
from ..wire.messages import Failed
from .channel import GATEWAY, Channel, Heard
from .elsewhere import Elsewhere
from .launcher import Launched

AFTERWARDS = "The workers were stopped; queue the prompt again and they start afresh."


def explain(
    launched: Launched | Elsewhere, devices: Sequence[str], channel: Channel, reports: Sequence[Failed]
) -> WorkerFailed:
    """The error for a group in which a process ended or a rank reported a failure.

    A process that was killed by a signal could not report; its peers' reports of lost connections are consequences.
    Of those on other machines the same holds for the first whose connection ended without a report. Otherwise the
    earliest report is the cause.
    """
    heard = channel.heard
    for rank, process in enumerate(launched.processes):
        if process.returncode is not None and process.returncode < 0:
            return WorkerFailed(
                f"{_who(rank, devices)} was killed by {_signal(-process.returncode)}{_doing(heard.get(rank))}. {AFTERWARDS}"
            )
    if isinstance(launched, Elsewhere):
        reported = {report.rank for report in reports}
        for rank in (rank for rank in channel.lost if rank != GATEWAY and rank not in reported):
            why = f" ({channel.lost[rank]})" if channel.lost[rank] else ""
            return WorkerFailed(f"{_who(rank, devices)} was lost{_doing(heard.get(rank))}{why}. {AFTERWARDS}")
    if reports:
        first = min(reports, key=lambda report: report.at)
        return _from_report(first, devices)
    for rank, process in enumerate(launched.processes):
        if process.returncode is not None:
            tail = launched.log_tail(rank)
            said = f" Its last words:\n{tail}" if tail else ""
            return WorkerFailed(
                f"{_who(rank, devices)} left with exit code {process.returncode}{_doing(heard.get(rank))}. {AFTERWARDS}{said}"
            )
    if isinstance(launched, Elsewhere):
        why = f" ({channel.lost[GATEWAY]})" if channel.lost.get(GATEWAY) else ""
        return WorkerFailed(f"The connection to {launched.address} was lost{_doing(heard.get(0))}{why}. {AFTERWARDS}")
    return WorkerFailed(f"The connection to the workers was lost. {AFTERWARDS}")


def unstartable(error: OSError) -> WorkerFailed:
    """The error where this machine would not even start processes."""
    return WorkerFailed(f"The workers could not be started: {error}. Free what is missing and queue again.")


def silent(rank: int, devices: Sequence[str], heard: Heard | None, seconds: float) -> WorkerFailed:
    """The error for a rank that no longer answers."""
    return WorkerFailed(f"{_who(rank, devices)} has not answered for {seconds:.0f} s{_doing(heard)}. {AFTERWARDS}")


def stalled(devices: Sequence[str], heard: Mapping[int, Heard], seconds: float) -> WorkerFailed:
    """The error for a group in which no rank gets anywhere; the one furthest behind is named."""
    rank = min(heard, key=lambda r: (heard[r].pulse.step, heard[r].pulse.marks))
    return WorkerFailed(
        f"No worker got anywhere for {seconds:.0f} s; the furthest behind is {_who(rank, devices).lower()}"
        f"{_doing(heard[rank])}. {AFTERWARDS}"
    )


def late(launched: Launched | Elsewhere, devices: Sequence[str], ready: Sequence[int], seconds: float) -> WorkerFailed:
    """The error for workers that did not come up in time."""
    missing = [rank for rank in range(len(devices)) if rank not in ready]
    names = ", ".join(f"{rank} ({devices[rank]})" for rank in missing)
    tail = launched.log_tail(missing[0]) if missing else ""
    said = f" Its last words:\n{tail}" if tail else ""
    return WorkerFailed(f"Worker {names} did not start within {seconds:.0f} s. {AFTERWARDS}{said}")


def _from_report(report: Failed, devices: Sequence[str]) -> WorkerFailed:
    where = f"{_who(report.rank, devices)}"
    when = f" while {report.phase}" + (f", step {report.step}" if report.step else "")
    if report.out_of_memory:
        return WorkerOutOfMemory(
            f"{where} ran out of memory{when}: {report.reason}. Use more workers, a smaller picture or a smaller batch. "
            f"{AFTERWARDS}"
        )
    trace = "\n".join(report.trace.strip().splitlines()[-8:])
    return WorkerFailed(f"{where} failed{when}: {report.reason}. {AFTERWARDS}\n{trace}")


def _who(rank: int, devices: Sequence[str]) -> str:
    return f"Worker {rank} of {len(devices)} ({devices[rank]})"


def _doing(heard: Heard | None) -> str:
    if heard is None:
        return " while starting"
    step = f", step {heard.pulse.step}" if heard.pulse.step else ""
    return f" while {'idle' if heard.pulse.phase == 'idle' else heard.pulse.phase}{step}"


def _signal(number: int) -> str:
    try:
        name = signal.Signals(number).name
    except ValueError:
        name = f"signal {number}"
    return f"{name} (often the system running out of memory)" if number == signal.SIGKILL else name
