"""PipeFusion while kernels are made at run time, as cuDNN's and Triton's are, which no early loading covers.

To take a new kernel a GPU may first have to be done with all that it was given, sends and receives too, and these are done once
the other stage has its part. What ranks give their GPUs is recorded on real ranks, and played on GPUs that wait in this way.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import msgspec
import pytest
import torch
import torch.distributed as dist

from parallel_backend.comm.meter import Meter
from parallel_backend.weights.stores.store import BlockAccess
from parallel_backend.worker.memory.stage_part import stages
from parallel_backend.worker.requests.sampling import sample
from tests.dry.dry_rank import inspected, model_of
from tests.dry.full_size import JOBS
from tests.dry.lone_rank import LoneRank, plan_of, program_for, request, tensors_of
from tests.support.comfy_oracle import comfy_on_path
from tests.support.ranks import run_ranks
from tests.support.selection import thorough

comfy_on_path()

CPU = torch.device("cpu")
SMALL = "FLUX.1, small"
STEPS = 4
FIRST = 2
"""Steps in which kernels are made: the one that runs whole, and the first in which patches stream."""

Event = tuple[Any, ...]
"""("send" or "receive", group, other rank), ("wait", number of what was given), ("kernel", step) or ("broadcast_flag",)."""


class Recorder(LoneRank, BlockAccess):
    """What a rank's host does, one after the other."""

    def __init__(self, model: Any) -> None:
        super().__init__(CPU, Meter(), model, self)
        self.events: list[Event] = []
        self.step = self.given = 0

    def enter(self, phase: str, step: int = 0) -> None:
        """A step begins."""
        self.step = step

    def broadcast_flag(self, flag: bool) -> bool:
        """Rank 0 tells, the others wait for it."""
        self.events.append(("broadcast_flag",))
        return flag

    @contextmanager
    def block(self, index: int) -> Iterator[None]:
        """A block may need a kernel that nobody has used."""
        self.events.append(("kernel", self.step))
        yield

    def batch(self, operations: Sequence[dist.P2POp]) -> list[Given]:
        """Stands for dist.batch_isend_irecv."""
        (operation,) = operations
        kind = "send" if operation.op is dist.isend else "receive"
        assert operation.group is not None
        self.events.append((kind, operation.group.group_name, operation.peer))
        self.given += 1
        return [Given(self, self.given - 1, batch(operations)[0])]


batch = dist.batch_isend_irecv


@dataclass
class Given:
    """Something that a GPU was given; its stream waits for it."""

    recorder: Recorder
    number: int
    work: dist.Work

    def wait(self) -> None:
        """Later work waits."""
        self.recorder.events.append(("wait", self.number))
        self.work.wait()

    def is_completed(self) -> bool:
        """Whether it is over."""
        return self.work.is_completed()


def record(number: int, cut: int, patches: int) -> tuple[list[Event], str]:
    """The events of a rank, and the name of the group of hosts."""
    plan = plan_of(JOBS[SMALL].blocks, patches, {"pipefusion": cut})
    plan = msgspec.structs.replace(plan, devices=("cpu",) * cut)
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
    """A send or receive; `after` is what it waits for of the same rank's."""

    kind: str
    other: int
    after: frozenset[int]
    done: bool = False


@dataclass
class Gpu:
    """A rank: its host, which has come to an event, and what it has given its GPU, by groups, each of which keeps the order."""

    events: Sequence[Event]
    at: int = 0
    given: list[tuple[str, Operation]] = field(default_factory=list)
    waited: set[int] = field(default_factory=set)
    agreed: int = 0

    def head(self, group: str) -> Operation | None:
        """What a group does next, if it may begin."""
        for name, operation in self.given:
            if name == group and not operation.done:
                return operation if all(self.given[number][1].done for number in operation.after) else None
        return None


def stuck(programs: Sequence[Sequence[Event]], hosts: str, kernels: int) -> list[int]:
    """The ranks that come to no end, where each block of the first steps needs a kernel."""
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
    """Let what a rank sends meet who receives it."""
    met = False
    for group in {name for name, _ in gpus[sender].given}:
        sent = gpus[sender].head(group)
        if sent is None or sent.kind != "send":
            continue
        received = gpus[sent.other].head(group)
        if received is not None and received.kind == "receive" and received.other == sender:
            sent.done = received.done = met = True
    return met


@pytest.mark.parametrize(
    ("cut", "patches"), [pytest.param(2, 4, marks=thorough), (3, 4), pytest.param(4, 5, marks=thorough)]
)
def test_stages_do_not_wait_for_each_other_while_kernels_are_made(cut: int, patches: int) -> None:
    inspected(SMALL)  # once for all ranks
    found = run_ranks(cut, lambda number: record(number, cut, patches))
    programs = [events for events, _ in found]
    hosts = found[0][1]
    assert stuck(programs, hosts, FIRST) == []
    assert stuck(programs, hosts, STEPS) == [*range(cut)], "what is begun ahead would hold them up, so the first is not"


def test_gpus_that_wait_for_each_other_are_seen() -> None:
    each = (
        [("receive", "a", 1), ("kernel", 1), ("send", "b", 1)],
        [("receive", "b", 0), ("kernel", 1), ("send", "a", 0)],
    )
    assert stuck(each, "", 1) == [0, 1]
    assert stuck(each, "", 0) == []
