"""The diagnosis of a failed group: the message for the user, with the earliest cause and the remedy."""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from ...errors import Refused, RequestFailed, WorkerFailed
from ...plan import ResolvedPlan
from ...plan.advice import gigabytes, memory_advice
from ...wire.to_host import FailedReply, MemoryShortage
from ...worker.process.status import CONNECTING
from .causes import LOST_PEER, REMEDIES, WorkerOutOfMemory, known_cause
from .channel import GATEWAY, Channel, Heard
from .launcher import WorkerProcesses, folder
from .remote import RemoteProcesses

AFTERWARDS = "The workers were stopped; queue the prompt again and they start afresh."
MEMORY_REMEDY = (
    "The system kills processes when the machine's memory is full: close other programs or use fewer workers. "
)


def explain(
    launched: WorkerProcesses | RemoteProcesses,
    devices: Sequence[str],
    channel: Channel,
    reports: Sequence[FailedReply],
    plan: ResolvedPlan | None = None,
) -> WorkerFailed:
    """Return the error for a group in which a process ended or a rank reported a failure. It names the earliest cause.

    A process that ended without a report could not make one. Its peers' reports of lost connections are then consequences.
    SIGABRT may be a consequence too: a library ends a process with it that has lost its peers. On other machines, a connection
    that ended without a report stands for a process that did.

    Args:
        plan: the plan of the request, if there was one.
    """
    heard, reported = channel.heard, {report.rank for report in reports}
    ended = {rank: p.returncode for rank, p in enumerate(launched.processes) if p.returncode is not None}
    silent_ends = {rank: code for rank, code in ended.items() if code < 0 or rank not in reported}
    killed = [rank for rank, code in silent_ends.items() if code < 0 and code != -signal.SIGABRT]
    own = [report for report in reports if not LOST_PEER.search(report.reason)]
    if killed:
        return _from_end(launched, killed[0], devices, heard)
    if isinstance(launched, RemoteProcesses):
        for rank in (rank for rank in channel.lost if rank != GATEWAY and rank not in reported):
            why = f" ({channel.lost[rank]})" if channel.lost[rank] else ""
            return WorkerFailed(f"{_who(rank, devices)} was lost{_doing(heard.get(rank))}{why}. {AFTERWARDS}")
    if own:
        return _from_report(min(own, key=lambda report: report.failed_at), launched, devices, plan)
    if silent_ends:
        rank = min(silent_ends, key=lambda rank: silent_ends[rank] == -signal.SIGABRT)
        return _from_end(launched, rank, devices, heard)
    if reports:
        return _from_report(min(reports, key=lambda report: report.failed_at), launched, devices, plan)
    if isinstance(launched, RemoteProcesses):
        why = f" ({channel.lost[GATEWAY]})" if channel.lost.get(GATEWAY) else ""
        return WorkerFailed(f"The connection to {launched.address} was lost{_doing(heard.get(0))}{why}. {AFTERWARDS}")
    return WorkerFailed(f"The connection to the workers was lost. {AFTERWARDS}")


def unstartable(error: OSError) -> WorkerFailed:
    """Return the error for a machine that cannot even start processes."""
    with contextlib.suppress(OSError):  # there is no folder at all, and the error says so
        for temporary in (tempfile.gettempdir(), folder()):
            if not (os.path.isdir(temporary) and os.access(temporary, os.W_OK | os.X_OK)):
                return WorkerFailed(
                    f"The workers could not be started: the temporary folder {temporary} does not exist, or ComfyUI "
                    f"cannot write to it ({error.strerror or error}). Create it, or restart ComfyUI with TMPDIR set "
                    "to another folder."
                )
    return WorkerFailed(f"The workers could not be started: {error}. {_remedy(str(error))}Queue the prompt again.")


def silent(rank: int, devices: Sequence[str], heard: Heard | None, seconds: float) -> WorkerFailed:
    """Return the error for a rank that no longer answers."""
    return WorkerFailed(f"{_who(rank, devices)} has not answered for {seconds:.0f} s{_doing(heard)}. {AFTERWARDS}")


def stalled(devices: Sequence[str], heard: Mapping[int, Heard], seconds: float) -> WorkerFailed:
    """Return the error for a group in which no rank makes progress. It names the rank that the others wait for.

    That rank itself waits for no other. If there are several ranks like that, or none, the error names the rank that is the
    furthest behind. GPUs that hang in their first exchange have P2P that their driver reports and that does not work.
    """
    rank = min(heard, key=lambda r: (heard[r].heartbeat.waiting, heard[r].heartbeat.step, heard[r].heartbeat.progress))
    what = "the others wait for" if _all_wait_for(rank, heard) else "the slowest is"
    return WorkerFailed(
        f"No worker made progress for {seconds:.0f} s; {what} {_who(rank, devices).lower()}{_doing(heard[rank])}. "
        f"{_unconnected(devices, heard[rank])}{AFTERWARDS}"
    )


def _unconnected(devices: Sequence[str], heard: Heard) -> str:
    """Return the remedy for GPUs that hang in their first exchange, with a space at the end, or an empty string."""
    gpus = any("cuda" in device for device in devices)
    return f"{REMEDIES['P2P']} " if gpus and heard.heartbeat.phase == CONNECTING else ""


def _all_wait_for(rank: int, heard: Mapping[int, Heard]) -> bool:
    return len(heard) > 1 and all(heard[peer].heartbeat.waiting != (peer == rank) for peer in heard)


def late(
    launched: WorkerProcesses | RemoteProcesses, devices: Sequence[str], ready: Sequence[int], seconds: float
) -> WorkerFailed:
    """Return the error for workers that did not start in time."""
    missing = [rank for rank in range(len(devices)) if rank not in ready]
    names = ", ".join(f"{rank} ({devices[rank]})" for rank in missing)
    tail = launched.log_tail(missing[0])
    return WorkerFailed(
        f"Worker {names} did not start within {seconds:.0f} s. {_remedy(tail)}{AFTERWARDS}{_log_text(tail)}"
    )


def _from_report(
    report: FailedReply, launched: WorkerProcesses | RemoteProcesses, devices: Sequence[str], plan: ResolvedPlan | None
) -> WorkerFailed:
    where = f"{_who(report.rank, devices)}"
    when = f" while {report.phase}" + (f", step {report.step}" if report.step else "")
    if report.shortage is not None:
        return WorkerOutOfMemory(f"{where} ran out of memory{when}: {_short(report.shortage, plan)} {AFTERWARDS}")
    if not report.trace:
        return WorkerFailed(f"{where} failed{when}: {report.reason} {AFTERWARDS}")
    tail, lines = launched.log_tail(report.rank), report.trace.strip().splitlines()
    trace = "" if lines[-1] in tail else "\n" + "\n".join(lines[-8:])  # in the log if the rank could not go on
    remedy = _remedy(f"{report.reason}\n{tail}")
    return WorkerFailed(f"{where} failed{when}: {report.reason}. {remedy}{AFTERWARDS}{trace}{_log_text(tail)}")


def _from_end(
    launched: WorkerProcesses | RemoteProcesses, rank: int, devices: Sequence[str], heard: Mapping[int, Heard]
) -> WorkerFailed:
    code = launched.processes[rank].returncode
    assert code is not None
    how = f"was killed by {_signal(-code)}" if code < 0 else f"ended with exit code {code}"
    tail = launched.log_tail(rank)
    remedy = MEMORY_REMEDY if code == -signal.SIGKILL else _remedy(tail)
    return WorkerFailed(f"{_who(rank, devices)} {how}{_doing(heard.get(rank))}. {remedy}{AFTERWARDS}{_log_text(tail)}")


def _remedy(text: str) -> str:
    """Return the remedy for a known cause, with a space at the end, or an empty string."""
    cause = known_cause(text)
    return f"{cause.remedy} " if cause else ""


def _log_text(tail: str) -> str:
    return f"\nThe last lines of its log:\n{tail}" if tail else ""


def _short(shortage: MemoryShortage, plan: ResolvedPlan | None) -> str:
    """Return the size of the failed allocation, the models on the device, and advice for the plan."""
    requested = gigabytes(shortage.requested_bytes) if shortage.requested_bytes else "more memory"
    models = shortage.models_on_device
    weights = ", ".join(f"{gigabytes(model.nbytes)} of {Path(model.model.path).name}" for model in models)
    sentence = (
        f"it asked for {requested} with {gigabytes(shortage.free_bytes)} free, and held {weights or 'no weights'}."
    )
    if plan is None:
        return sentence
    other_models = max(0, sum(model.nbytes for model in models) - shortage.model_bytes)
    missing = shortage.requested_bytes - shortage.free_bytes
    advice = memory_advice(plan, shortage.model_bytes, other_models, missing)
    return f"{sentence} {advice[0].upper()}{advice[1:]}."


def _who(rank: int, devices: Sequence[str]) -> str:
    return f"Worker {rank} of {len(devices)} ({devices[rank]})"


def _doing(heard: Heard | None) -> str:
    if heard is None:
        return " while starting"
    step = f", step {heard.heartbeat.step}" if heard.heartbeat.step else ""
    return f" while {'idle' if heard.heartbeat.phase == 'idle' else heard.heartbeat.phase}{step}"


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def raised_equal_errors(reports: Sequence[FailedReply], ranks: int) -> bool:
    """Return True if the ranks can go on after a failure.

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
        f"{f'{cause.remedy} ' if cause else ''}Change the inputs to the model and queue again; the workers keep "
        "running."
    )
