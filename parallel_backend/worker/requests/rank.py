"""The state of one rank for all requests: its device, the other ranks, the host, and the models that it holds."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
import torch.distributed as dist

from ...comm.communicator import Communicator
from ...comm.meter import Meter, OperationKind
from ...diffusion import ModelSpec
from ...mesh import Mesh, build_mesh
from ...mesh_axes import CONTROL
from ...models.comfyui.features.networks import Networks
from ...models.comfyui.model import ComfyForward
from ...models.family import Execution, Stage, StageModel
from ...models.family import ModelForward as ModelForward
from ...models.sequence_parallel.attentions import attends_alone, attention_refused
from ...plan import ResolvedPlan
from ...weights.adapters.merging import Keep
from ...weights.layers.expansion import Expansion, expand_by
from ...weights.loading.reading import Neighbours, Watch
from ...weights.stores.replicated import ReplicatedStore
from ...weights.stores.sharded import Sharded
from ...weights.stores.store import BlockAccess
from ...weights.stores.streamed import Streamed
from ...wire.to_host import CancelledReply, IssuedOperations, LoadingReply, MemoryShortage, ModelOnDevice, RankCostReply
from ...wire.to_worker import ForwardRequest, MeasureBlocksRequest, RunRequest, SampleRequest
from ..memory.adapter_store import AdapterStore
from ..memory.files import ModelFiles
from ..memory.holder import ModelHolder
from ..memory.rank_memory import Allowance, RankMemory, failed_allocation_bytes
from ..memory.stage_part import Arrange, StagePart, stages
from ..process.environment import Environment
from ..process.host_connection import HostConnection
from ..process.process_group import ProcessGroup
from ..process.status import CONNECTING, RankProgress
from .times import times

T = TypeVar("T")

GIGABYTE = 10**9

LOADING_SECONDS = 0.2
"""Seconds between two reports of the progress of loading."""

KEPT_OF_SPARE = 0.5
"""The fraction of spare memory that expanded weights may take. The need of a run is an estimate, and memory is fragmented."""


@dataclass(frozen=True)
class Prepared:
    """The model and forward that a request runs on this rank."""

    model: StageModel
    """This rank's stage, with its weights."""
    forward: ModelForward
    """The model's forward under the request's plan."""
    access: BlockAccess
    """Makes the weights of the stage's blocks usable while they run."""


class WorkerRank:
    """One rank with its weights and communicators. Only one rank replies to the host: the first rank of the last stage."""

    def __init__(
        self, environment: Environment, group: ProcessGroup, host: HostConnection, status: RankProgress, meter: Meter
    ) -> None:
        self.device = environment.device
        self.group = group
        self.host = host
        self.status = status
        self.meter = meter
        self.neighbours = group.neighbours(meter)
        machines = self.neighbours.machines
        self.memory = RankMemory(environment.device, machines.count(machines[group.rank]))
        self.holder = ModelHolder(self.memory, group.all_true, status)
        self.adapters = AdapterStore()
        self.expansion = Expansion(fused=environment.device.type == "cuda")
        self._networks = Networks(environment.device)
        self.files = ModelFiles(environment.models)
        self._mesh: tuple[tuple[int, ...], Mesh] | None = None
        self._read = 0
        self._opened = False
        self.mesh_bytes = self.everyone_bytes = 0
        """Bytes of the device that communicators took when they were opened: a plan's, and the one of all ranks."""

    def mesh(self, plan: ResolvedPlan) -> Mesh:
        """Return the communicators of a plan. Plans of equal degrees share them; other degrees close them. A collective."""
        if self._mesh is None or self._mesh[0] != plan.mesh_shape:
            self.forget_mesh()
            mesh, self.mesh_bytes = self.connect(lambda: build_mesh(plan, self.device, self.meter))
            self._mesh = plan.mesh_shape, mesh
        return self._mesh[1]

    def connect(self, build: Callable[[], T]) -> tuple[T, int]:
        """Open communicators. Return them and the bytes of the device that they took. A collective."""
        self.status.enter(CONNECTING)
        free = self.memory.free_on_device()
        built = build()
        self.memory.finish()
        return built, max(0, free - self.memory.free_on_device()) if self.device.type == "cuda" else 0

    def everyone(self, name: str, transport: str) -> Communicator:
        """Return a communicator of all ranks, independent of a plan's axes. A collective, which opens connections once.

        Args:
            name: the meter's name for its traffic.
            transport: the transport of the plan; "gloo" for tensors that go through host memory.
        """
        ranks = dist.group.WORLD if self.group.size > 1 else None
        axis = Communicator(name, ranks, self.device, self.device.type == "cuda" and transport == "gloo", self.meter)
        if not self._opened:
            _, self.everyone_bytes = self.connect(axis.warm_up)
            self._opened = True
        return axis

    def linked(self, transport: str) -> Neighbours:
        """Return all ranks for loading weights that several ranks hold. With NCCL, they also use GPU links. A collective."""
        return (
            replace(self.neighbours, links=self.everyone("loading", transport))
            if transport == "nccl"
            else self.neighbours
        )

    def forget_mesh(self) -> None:
        """Close the communicators in use. A collective."""
        if self._mesh is not None:
            self._mesh[1].close()
        self._mesh, self.mesh_bytes = None, 0

    def available(self, plan: ResolvedPlan) -> int:
        """Return the bytes that a job and its communicators may take of this rank's device: free memory and this rank's own."""
        sharers = plan.devices.count(plan.devices[self.group.rank])
        ours = sum(self.holder.on_device().values()) + self.mesh_bytes + self.everyone_bytes
        return self.memory.free_on_device() // sharers + ours

    def allowance(self, plan: ResolvedPlan, working: int = 0) -> Allowance:
        """Return the memory that this rank may use under a plan, given the bytes that a request needs for its work."""
        sharers = plan.devices.count(plan.devices[self.group.rank])
        return Allowance(int(plan.memory_limit * GIGABYTE) // sharers, working, sharers)

    def prepare(self, message: SampleRequest | ForwardRequest, mesh: Mesh) -> Prepared:
        """Return this rank's part of the model; load it first if necessary.

        Raises:
            Cancelled: the request was cancelled while the model was loaded. All ranks raise it.
            Refused: the model cannot run under this plan. All ranks raise it, before the model is loaded.
        """
        spec, plan = message.model, message.plan
        stage_of = stages(plan)
        watch = self.watch(message.request, mesh.replies_to_host)
        has_copies = len({*self._copies(plan)}) < self.group.size
        neighbours = self.linked(plan.transport) if has_copies else self.neighbours  # before weights take the memory

        def build() -> StagePart:
            stage = stage_of[self.group.rank]
            keep = Keep(self.memory.has_host_room, self.group.all_true)
            local_spec = self.files.find(spec)
            stage_part = StagePart(local_spec, stage, self._arrange(plan), self.device, neighbours, watch, keep)
            if stage_part.model.unknown and not attends_alone(mesh, plan.patches, plan.attention):
                raise attention_refused(stage_part.model.unknown)
            expand_by(stage_part.module, self.expansion)
            return stage_part

        part = self.holder.hold(spec, (stage_of, plan.weights), build, self.allowance(plan, message.working_bytes))
        self.status.enter("applying adapters")
        adapters = self.adapters.named(message.adapters)
        part.adapt(adapters, watch)
        self.expansion.make_kernels(part.module, getattr(torch, message.compute_dtype), self.device)
        compiler = message.compiler if isinstance(message, SampleRequest) else ""
        forward = part.model.forward_on(Execution(mesh, plan, part.access, self.status.on_progress, compiler))
        networks = self._networks.of(adapters)
        if networks:
            assert isinstance(forward, ComfyForward), "no other family takes networks"
            forward.networks = networks
        return Prepared(part.model, forward, part.access)

    def keeping(self) -> AbstractContextManager[None]:
        """Return a context for running the last prepared model, in which its expanded weights stay while memory is spare."""
        return self.expansion.keeping(int(KEPT_OF_SPARE * self.holder.spare))

    def broadcast_flag(self, flag: bool) -> bool:
        """Return rank 0's flag on every rank. A collective."""
        with self.meter.wait(CONTROL):
            return self.group.broadcast_flag(flag)

    def _max_int(self, forwards: int) -> int:
        """Return the largest number of forwards that a rank runs in a model call. A collective."""
        with self.meter.wait(CONTROL):
            return self.group.max_int(forwards)

    def _copies(self, plan: ResolvedPlan) -> list[tuple[Stage, int]]:
        """Return the stage and the machine of each rank. Ranks with equal values hold equal weights on one machine."""
        return [*zip(stages(plan), self.neighbours.machines, strict=True)]

    def _arrange(self, plan: ResolvedPlan) -> Arrange:
        """Return the function that makes the weight store for a plan: whole, sharded or streamed. A collective."""
        if plan.weights == "sharded":
            everyone = self.everyone("weights", plan.transport)
            return lambda module, blocks: _twice(
                Sharded(module, blocks, everyone, self._max_int, self.status.on_progress)
            )
        sharers = self.group.split_by_value(self._copies(plan), self.meter)
        if plan.weights == "streamed":
            return lambda module, blocks: _twice(Streamed(module, blocks, sharers, self.device, self.meter))
        return lambda module, blocks: (ReplicatedStore(module, sharers), BlockAccess())

    def watch(self, request: int, reports: bool) -> Watch:
        """Return an observer of loading, which counts bytes, reports to the host and is cancelled with the request.

        Args:
            reports: True if this rank reports the progress to the host.
        """
        reported = 0.0

        def progress(done: int, total: int) -> None:
            nonlocal reported
            self.status.on_progress()
            if reports and (done == total or time.monotonic() - reported > LOADING_SECONDS):
                reported = time.monotonic()
                self.host.send(LoadingReply(request, done, total))

        def read(nbytes: int) -> None:
            self._read += nbytes

        return Watch(lambda: self.group.broadcast_flag(self.host.cancelled(request)), progress, read)

    def begin(self) -> None:
        """Begin a request: reset the counts of bytes from disk and host memory, of phases and of operations."""
        self.holder.restored = self._read = 0
        self.status.entered.clear()
        self.group.issued = 0
        self.meter.begin_request()

    def start(self) -> float:
        """Reset the counts of bytes sent and the peak of memory. Return the time (time.perf_counter)."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
        self.meter.reset()
        return time.perf_counter()

    def report(self, request: int, model: ModelSpec, started: float, cache: int = 0, compiling: float = 0.0) -> None:
        """Send the host the cost of a request since `start`."""
        waiting = self.meter.waiting_seconds()  # waits for the device, so it comes before the time is read
        seconds = time.perf_counter() - started
        if self.device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(self.device)
        else:
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        report = RankCostReply(
            request=request,
            rank=self.group.rank,
            seconds=seconds,
            waiting=waiting,
            sent=dict(self.meter.sent),
            read=self._read,
            weights=self.holder.on_device().get(model, 0),
            cache=cache,
            peak=peak,
            models_on_device=self._models_on_device(),
            on_host=sum(self.holder.on_host().values()),
            restored=self.holder.restored,
            times=times(self.meter.timeline, self.status.entered),
            compiling=compiling,
        )
        self.host.send(report)

    def cancelled(self, message: RunRequest, answers: bool) -> None:
        """Reply to a request that was cancelled."""
        self.report(message.request, message.model, time.perf_counter())
        if answers:
            self.host.send(CancelledReply(message.request))

    def issued(self) -> list[IssuedOperations]:
        """Return the collective operations that this rank has issued since `begin`."""
        everyone = tuple(range(self.group.size))
        pairs = [*self.meter.tally.issued.items(), (OperationKind(CONTROL, everyone), self.group.issued)]
        return [IssuedOperations(operation.name, operation.ranks, count) for operation, count in pairs]

    def recover(self, message: RunRequest | MeasureBlocksRequest) -> None:
        """Free the state of a request that failed on every rank, and reply with its cost. A collective.

        The request's model is dropped too: adapters may be applied to a part of its weights, and a block may be in a forward.
        """
        if self._mesh is not None:
            self._mesh[1].finish_sending()
        self.meter.tally.wait_for_all()
        self.memory.finish()  # raises an error of the device
        self._networks = Networks(self.device)
        self.holder.drop(message.model)
        self.report(message.request, message.model, time.perf_counter())
        self.status.enter("idle")

    def forget(self) -> None:
        """Drop the adapters that a host has sent, because another host does not know them."""
        self.adapters = AdapterStore()

    def shortage(self, error: BaseException) -> MemoryShortage:
        """Return the state of the device's memory after it ran out with this error."""
        return MemoryShortage(
            failed_allocation_bytes(error), self.holder.free(), self.holder.requested_bytes, self._models_on_device()
        )

    def _models_on_device(self) -> list[ModelOnDevice]:
        return [ModelOnDevice(spec, nbytes) for spec, nbytes in self.holder.on_device().items()]


Both = TypeVar("Both", Sharded, Streamed)


def _twice(weights: Both) -> tuple[Both, Both]:
    """Return the same object as the weight store and as the block access."""
    return weights, weights
