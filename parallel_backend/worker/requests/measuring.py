"""Measurements for the choice of a plan: this machine, and one block of each kind of a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor

from ...attention.kernels import choose_kernel, refused_kernels
from ...attention.packages import package_failures
from ...comm.device_events import DeviceEvents
from ...comm.meter import Meter
from ...conditioning import ALONE
from ...errors import Refused
from ...mesh import build_mesh
from ...mesh_axes import mesh_degrees
from ...models.families import family_of
from ...models.family import Execution, Family, Stage
from ...plan import ResolvedPlan
from ...plan.predict.measure import HEAD_DIM, BlockTimes, device_kind, measure
from ...plan.predict.memory import connections
from ...weights.files.checkpoint import read_header
from ...weights.layers.cast import materialise
from ...weights.layers.quantised import compute_in
from ...weights.stores.store import BlockAccess
from ...wire.to_host import DeclinedReply, MeasureBlocksReply, MeasureMachineReply, MeasureMemoryReply
from ...wire.to_worker import MeasureBlocksRequest, MeasureMachineRequest, MeasureMemoryRequest
from ..memory.stage_part import STORAGE_DTYPES
from .rank import WorkerRank
from .unsharded import RUNS, ForwardExample, refuse_coupled_rows, time_forward


def measure_machine(rank: WorkerRank, message: MeasureMachineRequest) -> None:
    """Reply with the speed of devices and links, and the memory that a connection takes."""
    rank.forget_mesh()
    mesh = rank.mesh(message.plan)
    rank.status.enter("measuring devices and links")
    kinds = rank.group.all_gather_text(device_kind(str(rank.device)))
    dtype = torch.bfloat16 if rank.device.type == "cuda" else torch.float32
    attention = message.plan.attention
    if attention in refused_kernels(rank.device):  # a request to sample with this kernel will be declined
        attention = "auto"
    kernel = choose_kernel(attention, rank.device, dtype, HEAD_DIM, package_failures(rank.device))
    per_connection = rank.mesh_bytes / max(1, connections(message.plan))
    machine = measure(rank.device, mesh.ulysses, per_connection, kinds, kernel.attend)
    if mesh.replies_to_host:
        rank.host.send(MeasureMachineReply(message.request, machine))


def measure_memory(rank: WorkerRank, message: MeasureMemoryRequest) -> None:
    """Reply with the memory that a job may take of each rank's device. A collective."""
    rank.status.enter("measuring free memory")
    free = [int(text) for text in rank.group.all_gather_text(str(rank.available(message.plan)))]
    if rank.group.rank == 0:
        rank.host.send(MeasureMemoryReply(message.request, tuple(free)))


def measure_blocks(rank: WorkerRank, message: MeasureBlocksRequest, tensors: dict[str, Tensor]) -> None:
    """Reply with every rank's time for a block of each kind. A collective.

    For a model that runs unsharded, the times are those of `time_forward`. The request is declined if such a model couples the
    rows of a batch and the plan has several ranks.
    """
    mesh = rank.mesh(message.plan)
    rank.status.enter("timing the model's blocks")
    spec = rank.files.find(message.model)
    family = family_of(spec)
    _, config = family.inspect(read_header(spec.path))
    dtype = STORAGE_DTYPES[spec.dtype]
    example = ForwardExample(rank.device, dtype, tensors, message.values, rank.status.on_progress)
    coupling = ""
    if family.shape(config).unsharded:
        coupling = _coupling(rank, family, config, example)
        if coupling and message.plan.world_size > 1:
            if rank.group.rank == 0:
                rank.host.send(DeclinedReply(message.request, coupling))
            return
        seconds, counts = time_forward(family, config, example)
    else:
        seconds, counts = time_blocks(family, config, message.plan, example)
    local = torch.tensor(seconds, device=rank.device)[None, :, None]
    everyone = mesh.ulysses.all_gather(local, [len(counts)] * mesh.ulysses.size).view(-1, len(counts))
    if mesh.replies_to_host:
        times = BlockTimes(tuple(tuple(row) for row in everyone.tolist()), counts, bool(coupling))
        rank.host.send(MeasureBlocksReply(message.request, times))


def _coupling(rank: WorkerRank, family: Family, config: Any, example: ForwardExample) -> str:
    """Return the reason why the rows of a batch must be computed together; empty if there is none.

    There is none if each call has one row. Only rank 0 tries it, since the result is the same on all ranks. A collective.
    """
    problem = ""
    if rank.group.rank == 0 and ALONE not in example.values:
        try:
            refuse_coupled_rows(family, config, example)
        except Refused as refusal:
            problem = str(refusal)
    return rank.group.all_gather_text(problem)[0]


def time_blocks(
    family: Family, config: Any, plan: ResolvedPlan, example: ForwardExample
) -> tuple[list[float], tuple[int, ...]]:
    """Return the seconds of one block of each kind (the shortest of some runs), and the model's number of each kind.

    The blocks belong to a small model of the same widths, whose weights are zeros.

    Args:
        plan: the plan with the attention kernel.
        example: the inputs. Its `on_progress` is called after each block and each run.
    """
    small, counts = family.two_of_each(config)
    blocks, device = 2 * len(counts), example.device
    model = family.build(small, Stage(0, blocks, blocks))
    compute_in(model.module, example.x.dtype)
    materialise(model.module, example.dtype, device)
    for parameter in model.module.parameters():
        parameter.zero_()
    meter = Meter()
    alone = msgspec.structs.replace(plan, devices=plan.devices[:1], patches=1, shares=(1,), **mesh_degrees())
    events, inputs = DeviceEvents(device), example.inputs("time")

    def block_done() -> None:
        events.record()
        example.on_progress()

    forward = model.forward_on(Execution(build_mesh(alone, device, meter), alone, BlockAccess(), block_done))
    runs = []
    for _ in range(RUNS):
        forward(inputs, example.x, None)
        # Blocks may run more than once, as VACE's first ones do for each control video.
        runs.append(events.pop_seconds()[-blocks:])
        example.on_progress()  # reading the events has waited for the GPU
    return _second_of_each(runs), counts


def _second_of_each(runs: Sequence[Sequence[float]]) -> list[float]:
    """Return the time of the second block of each kind. The first block's time includes the work before the block."""
    return [min(run[first + 1] - run[first] for run in runs) for first in range(0, len(runs[0]), 2)]
