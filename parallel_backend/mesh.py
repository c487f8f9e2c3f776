"""The device mesh: a rank's coordinates and the communicators of its axes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from .comm.communicator import Communicator
from .plan import AXES, ResolvedPlan


@dataclass(frozen=True)
class Mesh:
    """One rank's place in the plan. `sequence` spans ring x ulysses; ranks in it are ordered as TokenLayout's."""

    ring: Communicator
    ulysses: Communicator
    sequence: Communicator


def build_mesh(plan: ResolvedPlan, device: torch.device) -> Mesh:
    """The communicators of this rank. A collective: every rank of the world calls it with the same plan.

    Each communicator is used once by all its members, so that none is created lazily in the middle of a denoise.
    """
    staged = device.type == "cuda" and plan.transport == "gloo"
    kind = "cuda" if plan.transport == "nccl" else "cpu"
    sizes = tuple(int(getattr(plan, axis)) for axis in AXES)
    mesh = init_device_mesh(kind, sizes, mesh_dim_names=AXES)
    groups = {axis: mesh.get_group(axis) for axis in AXES}
    communicators = {axis: Communicator(group, device, staged) for axis, group in groups.items()}
    world = dist.group.WORLD
    assert world is not None, "the process group is not up"
    sequence = Communicator(world, device, staged)
    for communicator in (*communicators.values(), sequence):
        communicator.warm_up()
    return Mesh(sequence=sequence, **communicators)
