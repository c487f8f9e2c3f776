"""PipeFusion does not deadlock while kernels are built at run time, as cuDNN's and Triton's are, which no early loading covers.

To load a new kernel, a GPU may first have to finish all its work, sends and receives included. These finish only once the other
stage has done its part. The operations that ranks give their GPUs are recorded on real ranks, and played on GPUs that wait in
this way.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from parallel_backend.comm.meter import Meter
from parallel_backend.weights.stores.store import BlockAccess
from parallel_backend.worker.memory.stage_part import stages
from parallel_backend.worker.requests.sampling import sample
from tests.dry.dry_rank import inspected, model_of
from tests.dry.full_size import JOBS
from tests.dry.lone_rank import LoneRank, program_for, request, tensors_of
from tests.support.comfy_oracle import comfy_on_path
from tests.support.plans import cpu_plan
from tests.support.ranks import run_ranks

comfy_on_path()

CPU = torch.device("cpu")
SMALL = "FLUX.1, small"
STEPS = 4
STAGES, PATCHES = 3, 4
FIRST = 2
"""Number of steps in which kernels are built: the whole step, and the first step in which patches stream."""

Event = tuple[Any, ...]
"""A recorded event: ("send" or "receive", group, other rank), ("wait", index of the operation), ("kernel", step) or
("broadcast_flag",).
"""


class Recorder(LoneRank, BlockAccess):
    """A rank that records the operations of its host in order."""

    def __init__(self, model: Any) -> None:
        super().__init__(CPU, Meter(), model, self)
        self.events: list[Event] = []
        self.step = self.given = 0

    def enter(self, phase: str, step: int = 0) -> None:
        """Note the step that begins."""
        self.step = step

    def broadcast_flag(self, flag: bool) -> bool:
        """Record that rank 0 sends the flag and the others wait for it."""
        self.events.append(("broadcast_flag",))
        return flag

    @contextmanager
    def block(self, index: int) -> Iterator[None]:
        """Record that a block may need a kernel that was not used before."""
        self.events.append(("kernel", self.step))
        yield

    def batch(self, operations: Sequence[dist.P2POp]) -> list[Given]:
        """Record a send or receive, in place of dist.batch_isend_irecv."""
        (operation,) = operations
        kind = "send" if operation.op is dist.isend else "receive"
        assert operation.group is not None
        self.events.append((kind, operation.group.group_name, operation.peer))
        self.given += 1
        return [Given(self, self.given - 1, batch(operations)[0])]


batch = dist.batch_isend_irecv


@dataclass
class Given:
    """An operation that a GPU was given; the GPU's stream waits for it."""

    recorder: Recorder
    number: int
    work: dist.Work

    def wait(self) -> None:
        """Make later work wait."""
        self.recorder.events.append(("wait", self.number))
        self.work.wait()

    def is_completed(self) -> bool:
        """Return True if the operation is over."""
        return self.work.is_completed()


def record(number: int) -> tuple[list[Event], str]:
    """Return the events of a rank, and the name of the hosts' group."""
    plan = cpu_plan(blocks=JOBS[SMALL].blocks, patches=PATCHES, pipefusion=STAGES)
    model = model_of(SMALL, whole=True, stage=stages(plan)[number])
    model.module.to_empty(device="cpu")
    for parameter in model.module.parameters():
        parameter.zero_()
    recorder = Recorder(model)
    cancel_flag = recorder.mesh(plan).cancel_flag
    tensors = tensors_of(JOBS[SMALL], 1, STEPS, torch.ones) | {"program": program_for(JOBS[SMALL], STEPS)}
    with torch.inference_mode(), mock.patch.object(dist, "batch_isend_irecv", recorder.batch):
        sample(recorder, request(JOBS[SMALL], plan, "float32"), tensors)  # type: ignore[arg-type]
    assert cancel_flag._group is not None
    return recorder.events, cancel_flag._group.group_name


@dataclass
class Operation:
    """A send or receive; `after` are the same rank's operations that it waits for."""

    kind: str
    other: int
    after: frozenset[int]
    done: bool = False


@dataclass
class Gpu:
    """A rank's state: the position of its host in the events, and its GPU's operations. Each group keeps their order."""

    events: Sequence[Event]
    at: int = 0
    given: list[tuple[str, Operation]] = field(default_factory=list)
    waited: set[int] = field(default_factory=set)
    agreed: int = 0

    def head(self, group: str) -> Operation | None:
        """Return the group's next operation, or None if it may not begin."""
        for name, operation in self.given:
            if name == group and not operation.done:
                return operation if all(self.given[number][1].done for number in operation.after) else None
        return None


def stuck(programs: Sequence[Sequence[Event]], hosts: str, kernels: int) -> list[int]:
    """Return the ranks that never finish, if each block of the first steps needs a kernel."""
    gpus = [Gpu(events) for events in programs]
    moved = True
    while moved:
        went_on = [_host_goes_on(gpu, gpus[0], hosts, kernels) for gpu in gpus]
        met = [_exchange(gpus, number) for number in range(len(gpus))]
        moved = any(went_on) or any(met)
    return [number for number, gpu in enumerate(gpus) if gpu.at < len(gpu.events)]


def _host_goes_on(gpu: Gpu, leader: Gpu, hosts: str, kernels: int) -> bool:
    before = gpu.at
    while gpu.at < len(gpu.events):
        match gpu.events[gpu.at]:
            case ("broadcast_flag",):
                if gpu is not leader and leader.agreed <= gpu.agreed:
                    break
                gpu.agreed += 1
            case ("kernel", step):
                if step <= kernels and not all(operation.done for name, operation in gpu.given if name != hosts):
                    break
            case ("wait", number):
                name, operation = gpu.given[number]
                if name == hosts and operation.kind == "receive" and not operation.done:
                    break
                gpu.waited |= {number} if name != hosts else set()
            case (kind, group, other):
                gpu.given.append((group, Operation(kind, other, frozenset(gpu.waited))))
        gpu.at += 1
    return gpu.at > before


def _exchange(gpus: Sequence[Gpu], sender: int) -> bool:
    """Complete the rank's next sends whose receivers are ready."""
    met = False
    for group in {name for name, _ in gpus[sender].given}:
        sent = gpus[sender].head(group)
        if sent is None or sent.kind != "send":
            continue
        received = gpus[sent.other].head(group)
        if received is not None and received.kind == "receive" and received.other == sender:
            sent.done = received.done = met = True
    return met


def test_stages_do_not_wait_for_each_other_while_kernels_are_made() -> None:
    inspected(SMALL)  # cache the inspection before the ranks fork
    found = run_ranks(STAGES, record)
    programs = [events for events, _ in found]
    hosts = found[0][1]
    assert stuck(programs, hosts, FIRST) == []
    assert stuck(programs, hosts, STEPS) == [*range(STAGES)], "work that is begun ahead would hold them up"
