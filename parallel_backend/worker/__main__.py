"""The main function of a worker: connect to the host, join the other ranks, carry out requests until it is told to leave."""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence

from ..comfyui_folder import FOLDER
from ..comm.meter import DIRECTORY as TRACE_DIRECTORY
from ..comm.meter import Meter, Trace
from ..errors import Refused
from ..wire.to_host import ConnectReply, FailedReply, IssuedOperations, JoinReply, MemoryShortage
from ..wire.to_worker import JoinRequest, ShutdownRequest
from .memory.rank_memory import failed_allocation_bytes, is_out_of_memory
from .process.environment import Environment, own_facts
from .process.faults import Faults
from .process.host_connection import HostConnection
from .process.process_group import ProcessGroup
from .process.rendezvous import Rendezvous, connect_to_host
from .process.status import RankProgress
from .requests.engine import Engine
from .requests.rank import WorkerRank


def main(arguments: Sequence[str]) -> int:
    """Run one rank. Return 0, or 1 after a failure.

    A failure before the connection to the host is printed to stderr. A later failure is also reported to the host.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in the terminal is for ComfyUI, which stops the workers
    faulthandler.enable()  # a crash leaves its stack in the log
    status = RankProgress()
    try:
        environment = Environment.read(arguments, os.environ)
        os.environ[FOLDER] = environment.comfyui  # a model may import ComfyUI from there later
        if environment.fault_file is not None:
            status.faults = Faults(environment.fault_file, environment.rank)
        status.enter("starting")
        rendezvous = connect_to_host(environment)
    except (Refused, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    hello = ConnectReply(rendezvous.generation, own_facts(environment.device))
    host = HostConnection(rendezvous.connection, environment.rank, hello, status, rendezvous.leave)
    rank: WorkerRank | None = None
    report = functools.partial(_report, environment, host, status)
    try:
        group = _join(environment, rendezvous, status)
        rank = WorkerRank(environment, group, host, status, _meter(environment))
        return _serve(rank, report)
    except Exception as error:
        failed = report(error, rank)
        with contextlib.suppress(OSError):  # the disk with the log may be full
            print(failed.trace or failed.reason, file=sys.stderr, flush=True)
        time.sleep(rendezvous.linger)
        return 1


def _report(
    environment: Environment,
    host: HostConnection,
    status: RankProgress,
    error: Exception,
    rank: WorkerRank | None,
    issued: list[IssuedOperations] | None = None,
) -> FailedReply:
    """Send the host a FailedReply and return it."""
    refused = isinstance(error, Refused)  # a sentence for the user, which needs no traceback
    failed = FailedReply(
        rank=environment.rank,
        device=str(environment.device),
        phase=status.doing(),
        step=status.step,
        shortage=_shortage(error, rank),
        reason=str(error) if refused else f"{type(error).__name__}: {error}".removesuffix(": "),
        trace="" if refused else traceback.format_exc(),
        failed_at=time.time(),
        error=type(error).__name__,
        issued=issued,
    )
    host.send(failed)
    return failed


def _join(environment: Environment, rendezvous: Rendezvous, status: RankProgress) -> ProcessGroup:
    status.enter("joining the other workers")
    return ProcessGroup(environment, rendezvous.store())


def _shortage(error: BaseException, rank: WorkerRank | None) -> MemoryShortage | None:
    """Return the state of the memory if the error is out of memory.

    `rank` is None before the rank has started: its CUDA context may run out of memory.
    """
    if not is_out_of_memory(error):
        return None
    if rank is not None:
        with contextlib.suppress(RuntimeError):  # a failed device does not respond
            return rank.shortage(error)
    return MemoryShortage(failed_allocation_bytes(error), free_bytes=0, model_bytes=0, models_on_device=[])


def _meter(environment: Environment) -> Meter:
    trace_directory = os.environ.get(TRACE_DIRECTORY)
    trace = Trace(trace_directory, environment.rank) if trace_directory else None
    return Meter(trace=trace, device=environment.device)


def _serve(rank: WorkerRank, report: Callable[..., FailedReply]) -> int:
    engine, group, host = Engine(rank), rank.group, rank.host
    rank.status.enter("idle")
    while True:
        rank.status.occupied = False
        frame = group.relay(host.next() if group.rank == 0 else None, rank.status.occupy)
        match frame.message:
            case JoinRequest(generation=generation):
                rank.forget()
                host.send(JoinReply(generation))
            case ShutdownRequest():
                group.close()
                return 0
            case message:
                try:
                    engine.execute(frame)
                    continue
                except Exception as error:
                    if not engine.can_recover(frame, error):
                        raise
                    report(error, rank, rank.issued())
                # Other ranks may still run the request, so no collective may start until all have reported to the host.
                if not host.may_recover(getattr(message, "request", -1)):
                    return 1
                engine.recover(frame)


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # gloo's and the connection's threads would delay a normal exit
