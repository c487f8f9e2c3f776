"""WorkerGroup: the workers of one generation, from start to end, one request at a time."""

from __future__ import annotations

import contextlib
import enum
import logging
import queue
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields

from torch import Tensor

from ...diffusion import ModelSpec
from ...errors import Cancelled, Refused, WorkerFailed
from ...plan import ResolvedPlan
from ...wire.address import Address
from ...wire.frames import Frame
from ...wire.message import Message
from ...wire.to_host import (
    BusyReply,
    CancelledReply,
    ConnectReply,
    DeclinedReply,
    DecodedPixelsReply,
    DoneReply,
    FailedReply,
    JoinReply,
    LoadingReply,
    MeasureBlocksReply,
    MeasureMachineReply,
    MeasureMemoryReply,
    RankCostReply,
    RankFacts,
    SampleStepReply,
)
from ...wire.to_worker import (
    CancelRequest,
    JoinRequest,
    RecoverRequest,
    ReleaseModelRequest,
    RunRequest,
    ShutdownRequest,
)
from ...worker.process.status import CONNECTING
from . import diagnosis
from .channel import Channel, Disconnected, LocalChannel, Received
from .diagnosis import raised_equal_errors, request_error
from .known_adapters import KnownAdapters
from .launcher import WorkerProcesses, launch, make_folder, socket_path
from .pending_request import IsCancelled, PendingRequest, RequestReply
from .processes import ForkServer
from .remote import RemoteChannel, RemoteProcesses, address_of, device_names, is_remote
from .status import GroupStatus, model_name, rank_statuses
from .versions import check_members

log = logging.getLogger(__name__)

POLL_SECONDS = 0.05

SLOWER_TO_CONNECT = 3
"""Factor by which the allowed silence is longer while communicators are opened."""


@dataclass(frozen=True)
class Deadlines:
    """Seconds after which a phase counts as failed.

    Attributes:
        start: until all workers are ready.
        silence: since a rank's last heartbeat, or since the last activity of a fork server that is to fork a worker.
        stall: since any rank made progress.
        cancel: until a cancelled request has ended.
        report: for the other ranks' reports once a rank has failed.
        leave: for workers to leave when they are told to.
        proof: for each call of a small model that is proved.
        derive: for deriving the declaration of a class that has none.
    """

    start: float = 300
    silence: float = 30
    stall: float = 300
    cancel: float = 60
    report: float = 1
    leave: float = 5
    proof: float = 60
    derive: float = 600

    @classmethod
    def read(cls, variables: Mapping[str, str]) -> Deadlines:
        """Return the defaults with the changes in PARALLEL_DEADLINES, such as `stall=900,start=600`.

        Raises:
            Refused: the variable is not understood.
        """
        text = variables.get("PARALLEL_DEADLINES", "")
        try:
            return cls(**{name.strip(): float(value) for name, value in (p.split("=") for p in text.split(",") if p)})
        except (ValueError, TypeError):
            names = ", ".join(field.name for field in fields(cls))
            raise Refused(
                f"PARALLEL_DEADLINES={text!r} is not understood: write seconds as in stall=900,start=600. The names "
                f"are {names}."
            ) from None


class State(enum.Enum):
    """The states of a group. They never go back: after FAILED or STOPPED, a new group of a new generation takes its place."""

    STARTING = "starting"
    READY = "ready"
    RUNNING = "running"
    FAILED = "failed"
    STOPPED = "stopped"


class WorkerGroup:
    """A group of worker processes on a list of devices. The constructor starts them, or connects to those on other machines.

    Args:
        kernels_early: True if the workers load all kernels when they start. Workers on other machines do as they were started.
        imports: modules that are imported once for all workers.

    Raises:
        WorkerFailed: the workers did not start.
        Refused: ranks differ in their versions, or those on other machines cannot be reached.
        Cancelled: the user cancelled meanwhile.
    """

    def __init__(
        self,
        server: Callable[[], ForkServer],
        devices: tuple[str, ...],
        generation: int,
        deadlines: Deadlines,
        is_cancelled: IsCancelled,
        kernels_early: bool = False,
        imports: Sequence[str] = (),
    ) -> None:
        self.devices = devices
        self.kernels_early = kernels_early
        self.state = State.STARTING
        self._deadlines = deadlines
        self._reports: list[FailedReply] = []
        self._progress_before: dict[int, int] = {}
        self.died_idle = False
        """True if the group failed because a worker had ended before it began with the request."""
        self._latest: dict[int, RankCostReply] = {}
        """Each rank's last report of the memory that it holds."""
        self._plan: ResolvedPlan | None = None
        self._model = ""
        self._known = KnownAdapters()
        self._channel: Channel
        self._launched: WorkerProcesses | RemoteProcesses
        self._members: dict[int, RankFacts] = {}
        if is_remote(devices[0]):
            self._connect(address_of(devices[0]), is_cancelled)
        else:
            self._launch(server(), generation, imports)
        try:
            self._wait_until_ready(is_cancelled)
        except BaseException as error:
            ours = bool(self._launched.processes)
            self._end(State.FAILED if ours or isinstance(error, WorkerFailed) else State.STOPPED)
            if isinstance(error, OSError):
                raise diagnosis.unstartable(error) from error
            raise
        self.state = State.READY

    def _launch(self, server: ForkServer, generation: int, imports: Sequence[str]) -> None:
        try:
            with contextlib.ExitStack() as undo:
                folder = make_folder()
                undo.callback(folder.remove)
                self._channel = LocalChannel(socket_path(folder.path), generation, self._deadlines.silence)
                undo.callback(self._channel.close)
                self._launched = launch(server, folder, self.devices, generation, self.kernels_early, imports)
                undo.pop_all()
        except OSError as error:
            raise diagnosis.unstartable(error) from error

    def _connect(self, address: Address, is_cancelled: IsCancelled) -> None:
        channel = RemoteChannel(address, is_cancelled)
        self._channel, self._launched = channel, RemoteProcesses(address)
        self._members = dict(enumerate(channel.members))
        current_devices = device_names(address, channel.members)
        if current_devices != self.devices:
            self._end(State.STOPPED)
            raise Refused(
                f"the workers at {address} have changed since the plan was made ({len(current_devices)} on "
                f"{', '.join(dict.fromkeys(member.host for member in channel.members))}; {len(self.devices)} then): "
                "queue again."
            )
        self._send(JoinRequest(channel.generation), {})

    @property
    def members(self) -> list[RankFacts]:
        """Return the facts that the ranks have reported, in rank order."""
        return [self._members[rank] for rank in range(len(self.devices))]

    def alive(self) -> bool:
        """Return True if the group can take a request. This call finds workers that died while idle."""
        dead = self._channel.lost or any(p.poll() is not None for p in self._launched.processes)
        if self.state is State.READY and dead:
            log.warning("%s", self._failure())
            self._end(State.FAILED)
        return self.state is State.READY

    def resident_bytes(self, model: ModelSpec, device: str) -> int:
        """Return the bytes of a model's weights that the workers on a device hold there."""
        reports = (report for report in self._latest.values() if self.devices[report.rank] == device)
        return sum(entry.nbytes for report in reports for entry in report.models_on_device if entry.model == model)

    def models(self) -> set[ModelSpec]:
        """Return the models whose weights the workers hold on their devices."""
        return {entry.model for report in self._latest.values() for entry in report.models_on_device}

    def status(self) -> GroupStatus:
        """Return the ranks' activity and memory, as far as known now. Any thread may call this at any time."""
        lost = self.state is State.READY and self._channel.lost
        ranks = rank_statuses(self.devices, self._channel.heard, self._latest)
        return GroupStatus((State.FAILED if lost else self.state).value, self._model, ranks)

    def execute(self, exchange: PendingRequest) -> RequestReply:
        """Send the adapters that the workers do not know yet, then the request, and wait for its end.

        Raises:
            Cancelled: the user cancelled. The workers are ready again.
            Refused, RequestFailed: the request's data cannot work. The workers are ready again.
            WorkerFailed: the group has failed and is stopped.
        """
        assert self.state is State.READY
        self._plan = None if isinstance(exchange.message, ReleaseModelRequest) else exchange.message.plan
        self._model = model_name(spec) if (spec := getattr(exchange.message, "model", None)) else ""
        self.state = State.RUNNING
        self._progress_before = {rank: heard.heartbeat.progress for rank, heard in self._channel.heard.items()}
        try:
            for message, tensors in self._known.missing(exchange.adapters):
                self._send(message, tensors)
            return self._converse(exchange)
        except WorkerFailed:
            self.died_idle = self._ended_before_beginning()
            self._end(State.FAILED)
            raise
        finally:
            self._model = ""
            if self.state is State.RUNNING:
                self.state = State.READY

    def _ended_before_beginning(self) -> bool:
        reported = {report.rank for report in self._reports}
        return any(
            process.returncode is not None
            and rank not in reported
            and self._channel.heard[rank].heartbeat.progress == self._progress_before.get(rank)
            for rank, process in enumerate(self._launched.processes)
        )

    def stop(self) -> None:
        """End the workers, which leave nothing behind."""
        if self.state in (State.STOPPED, State.FAILED):
            return
        if self._launched.processes:
            self._send(ShutdownRequest(), {})
        self._end(State.STOPPED)

    def _converse(self, exchange: PendingRequest) -> RequestReply:
        message, started = exchange.message, self._channel.clock.now()
        self._send(message, exchange.tensors)
        cancelled_at: float | None = None
        cancelled_by: BaseException | None = None
        answer: RequestReply | None = None
        reports: list[RankCostReply] = []
        expected = len(self.devices) if isinstance(message, RunRequest | ReleaseModelRequest) else 0
        over = False
        while not over or len(reports) < expected:
            frame = self._next_frame(started)
            if frame is not None and getattr(frame.message, "request", message.request) != message.request:
                continue  # a late preview of an earlier request that failed
            match frame.message if frame else None:
                case FailedReply():
                    error = self._recover(message.request)
                    raise cancelled_by or error
                case SampleStepReply() | DecodedPixelsReply() if cancelled_by is None and frame is not None:
                    cancelled_by = _raised_by(exchange.on_message, frame)
                case LoadingReply(done=done, total=total) if cancelled_by is None:
                    cancelled_by = _raised_by(exchange.caller.on_loading, done, total)
                case RankCostReply() as report:
                    reports.append(report)
                    self._latest[report.rank] = report
                case DoneReply() | MeasureMachineReply() | MeasureMemoryReply() | MeasureBlocksReply() if (
                    frame is not None
                ):
                    answer, over = RequestReply(frame, reports), True
                case CancelledReply():
                    cancelled_by, over = cancelled_by or Cancelled(), True
                case DeclinedReply(reason=reason):
                    raise Refused(reason)
            if cancelled_by is None and exchange.caller.is_cancelled():
                cancelled_by = Cancelled()
            if cancelled_by is not None and cancelled_at is None:
                cancelled_at = self._channel.clock.now()
                self._send(CancelRequest(message.request), {})
            if cancelled_at is not None and self._channel.clock.now() - cancelled_at > self._deadlines.cancel:
                log.warning(
                    "the workers did not stop within %.0f s of a cancellation and were ended", self._deadlines.cancel
                )
                self._end(State.FAILED)
                raise cancelled_by or Cancelled
        if cancelled_by is not None:
            raise cancelled_by
        assert answer is not None
        return answer

    def _send(self, message: Message, tensors: Mapping[str, Tensor], rank: int = 0) -> None:
        try:
            self._channel.send(rank, message, tensors)
        except TimeoutError:
            raise diagnosis.silent(rank, self.devices, self._channel.heard.get(rank), self._deadlines.silence) from None
        except OSError:
            pass  # the Disconnected event that follows has the reason

    def _next_frame(self, since: float) -> Frame | None:
        """Return the next frame, or None if none comes soon.

        If all ranks failed with the same error and can go on, the frame is a FailedReply.

        Raises:
            WorkerFailed: something else is wrong with a rank.
        """
        try:
            event = self._channel.events.get(timeout=POLL_SECONDS)
        except queue.Empty:
            event = None
        match event:
            case Disconnected():
                raise self._failure()
            case Received(frame=Frame(message=FailedReply() as report) as frame):
                self._reports.append(report)
                failure = self._failure()
                if self.state is State.RUNNING and raised_equal_errors(self._reports, len(self.devices)):
                    return frame
                raise failure
            case Received(frame=frame):
                return frame
        self._check_heartbeats(since)
        return None

    def _recover(self, request: int) -> Exception:
        """Send ranks that failed with the same error a RecoverRequest, wait for their replies, and return the error.

        Raises:
            WorkerFailed: a rank failed meanwhile.
        """
        error, trace = request_error(self._reports), self._reports[0].trace
        self._reports = []
        log.warning("%s\n%s", error, trace)
        for rank in range(len(self.devices)) if self._launched.processes else [0]:  # a gateway tells all ranks
            self._send(RecoverRequest(request), {}, rank)
        started, ready = self._channel.clock.now(), set[int]()
        while len(ready) < len(self.devices):
            frame = self._next_frame(started)
            if frame is not None and isinstance(frame.message, RankCostReply) and frame.message.request == request:
                ready.add(frame.message.rank)
                self._latest[frame.message.rank] = frame.message
        return error

    def _failure(self) -> WorkerFailed:
        """Wait a moment for the other ranks' reports, and return the error with the cause."""
        if self._channel.broken is not None:
            return diagnosis.unstartable(self._channel.broken)
        now = self._channel.clock.now
        until = now() + self._deadlines.report
        while len(self._reports) < len(self.devices) and (remaining := until - now()) > 0:
            try:
                event = self._channel.events.get(timeout=min(remaining, POLL_SECONDS))
            except queue.Empty:
                event = None
            if isinstance(event, Received) and isinstance(event.frame.message, FailedReply):
                self._reports.append(event.frame.message)
            processes = self._launched.processes
            if processes and all(process.poll() is not None for process in processes):
                until = min(until, now() + POLL_SECONDS)
        for process in self._launched.processes:
            process.poll()
        return diagnosis.explain(self._launched, self.devices, self._channel, self._reports, self._plan)

    def _check_heartbeats(self, since: float) -> None:
        now, heard = self._channel.clock.now(), self._channel.heard
        for rank in range(len(self.devices)):
            last = heard.get(rank)
            quiet = now - max(since, last.at if last else since)
            connecting = (
                last is not None and last.heartbeat.phase == CONNECTING
            )  # NCCL may keep Python from running meanwhile
            if quiet > self._deadlines.silence * (SLOWER_TO_CONNECT if connecting else 1):
                raise diagnosis.silent(rank, self.devices, heard.get(rank), quiet)
        still = now - max([since, *(h.moved for h in heard.values())])
        if still > self._deadlines.stall:
            raise diagnosis.stalled(self.devices, heard, still)

    def _wait_until_ready(self, is_cancelled: IsCancelled) -> None:
        started = self._channel.clock.now()
        ready: set[int] = set()
        while len(ready) < len(self.devices):
            try:
                event = self._channel.events.get(timeout=POLL_SECONDS)
            except queue.Empty:
                event = None
            match event:
                case Received(rank=rank, frame=Frame(message=ConnectReply(facts=facts))):
                    self._members[rank] = facts
                    if rank == 0:
                        self._send(JoinRequest(self._channel.generation), {})
                case Received(rank=rank, frame=Frame(message=JoinReply(generation=generation))):
                    if generation == self._channel.generation:
                        ready.add(rank)
                case Received(frame=Frame(message=BusyReply(client=client))):
                    raise Refused(
                        f"these workers are serving another client ({client}): wait until it has released them, or end it."
                    )
                case Disconnected() if not self._launched.processes:
                    raise self._failure()
                case Received(frame=Frame(message=FailedReply() as report)):
                    self._reports.append(report)
                    raise self._failure()
            if any(process.poll() is not None for process in self._launched.processes):
                raise self._failure()
            if is_cancelled():
                raise Cancelled
            if self._channel.clock.now() - started > self._deadlines.start:
                raise diagnosis.late(self._launched, self.devices, sorted(ready), self._deadlines.start)
        check_members(self.members)
        for failure in dict.fromkeys(failure for member in self.members for failure in member.kernel_faults.values()):
            log.warning("Parallel: %s; attention auto does not use it on that device", failure)

    def _end(self, state: State) -> None:
        self.state = state
        if state is State.FAILED:
            self._channel.give_up()
        self._launched.end(self._deadlines.leave if state is State.STOPPED else 0)
        self._channel.close()


def _raised_by(function: Callable[..., None], *arguments: object) -> BaseException | None:
    """Call a function of ComfyUI's and return the exception that it raises, or None.

    ComfyUI interrupts a run by the exception, which has to wait until the workers are idle.
    """
    try:
        function(*arguments)
    except BaseException as error:
        return error
    return None
