"""The device mesh: a rank's coordinates and the communicators of its axes."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from .comm.communicator import Communicator
from .comm.meter import Meter
from .plan import AXES, ResolvedPlan


@dataclass(frozen=True)
class Mesh:
    """One rank's place in the plan.

    `sequence` spans ring x ulysses, its ranks ordered as TokenLayout's. `pipefusion` carries activations from stage to
    stage and `returning` latents from the last stage to the first: two communicators, so that neither waits for the
    other. `stage` spans all ranks of this rank's stage, on CPU tensors.
    """

    data: Communicator
    cfg: Communicator
    pipefusion: Communicator
    returning: Communicator
    ring: Communicator
    ulysses: Communicator
    sequence: Communicator
    stage: Communicator
    world: DeviceMesh

    @property
    def first(self) -> bool:
        """Whether this rank is of the first pipeline stage."""
        return self.pipefusion.rank == 0

    @property
    def last(self) -> bool:
        """Whether this rank is of the last pipeline stage."""
        return self.pipefusion.rank == self.pipefusion.size - 1

    @property
    def reports(self) -> bool:
        """Whether this rank, alone of all, answers the host: the first of the last stage."""
        return self.last and self.sequence.rank == self.cfg.rank == self.data.rank == 0


def build_mesh(plan: ResolvedPlan, device: torch.device, meter: Meter) -> Mesh:
    """The communicators of this rank. A collective: every rank of the world calls it with the same plan.

    Each communicator is used once by all its members, so that none is created lazily in the middle of a denoise.
    """
    staged = device.type == "cuda" and plan.transport == "gloo"
    kind = "cuda" if plan.transport == "nccl" else "cpu"
    sizes = tuple(int(getattr(plan, axis)) for axis in AXES)
    axes = init_device_mesh(kind, sizes, mesh_dim_names=AXES)
    groups = {axis: axes.get_group(axis) for axis in AXES}
    groups["returning"] = init_device_mesh(kind, sizes, mesh_dim_names=AXES).get_group("pipefusion")
    groups["sequence"] = axes["ring", "ulysses"]._flatten("sequence").get_group()
    communicators = {name: Communicator(name, group, device, staged, meter) for name, group in groups.items()}
    stage = Communicator("stage", _stage_group(sizes), torch.device("cpu"), False, meter)
    for communicator in (*communicators.values(), stage):
        communicator.warm_up()
    world = init_device_mesh(kind, (math.prod(sizes),), mesh_dim_names=("world",))
    meter.reset()
    return Mesh(stage=stage, world=world, **communicators)


def _stage_group(sizes: tuple[int, ...]) -> dist.ProcessGroup:
    """The gloo group of the ranks that share this rank's pipeline stage."""
    ranks = torch.arange(math.prod(sizes)).view(sizes)
    pipefusion = AXES.index("pipefusion")
    mine = None
    for members in ranks.movedim(pipefusion, 0).flatten(1).tolist():
        group = dist.new_group(members, backend="gloo")
        if dist.get_rank() in members:
            mine = group
    assert mine is not None
    return mine
