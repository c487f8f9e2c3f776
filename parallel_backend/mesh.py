"""The device mesh: a rank's coordinates and the communicators of its axes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from .comm.communicator import Communicator
from .comm.meter import Meter
from .plan import AXES, Place, ResolvedPlan

FOREVER = timedelta(days=365)
"""Collectives have no timeout of their own: ranks wait idle in one between prompts, and the host watches for hangs."""

HOPS = 2
"""Of so many stages only the first one sends activations."""


@dataclass(frozen=True)
class Mesh:
    """One rank's place in the plan.

    `sequence` spans ring x ulysses, its ranks ordered as SequenceSplit's. `pipefusion` carries activations from even stages
    to the next, `odd_hops` from odd ones, and `returning` latents from the last stage to the first: a communicator does one
    thing after the other, and what a stage has begun to receive must not hold up what it sends. On CPU tensors, from host
    to host, are `stage`, which spans all ranks of this rank's stage, and `word`, which carries the word of Cancel from stage to
    stage.
    """

    data: Communicator
    cfg: Communicator
    pipefusion: Communicator
    odd_hops: Communicator
    returning: Communicator
    ring: Communicator
    ulysses: Communicator
    sequence: Communicator
    stage: Communicator
    word: Communicator
    groups: tuple[dist.ProcessGroup, ...]

    @property
    def first(self) -> bool:
        """Whether this rank is of the first pipeline stage."""
        return self.pipefusion.rank == 0

    @property
    def last(self) -> bool:
        """Whether this rank is of the last pipeline stage."""
        return self.pipefusion.rank == self.pipefusion.size - 1

    @property
    def sees_latent(self) -> bool:
        """Whether this rank's stage runs what a model does before its blocks or after them, which reads the latent."""
        return self.first or self.last

    @property
    def to_next(self) -> Communicator:
        """What this stage sends activations on."""
        return self.odd_hops if self.pipefusion.rank % 2 else self.pipefusion

    @property
    def from_previous(self) -> Communicator:
        """What this stage receives activations on."""
        return self.pipefusion if self.pipefusion.rank % 2 else self.odd_hops

    @property
    def reports(self) -> bool:
        """Whether this rank, alone of all, answers the host: the first of the last stage."""
        return self.last and self.sequence.rank == self.cfg.rank == self.data.rank == 0

    def finish_sending(self) -> None:
        """Wait until everything sent to other stages has left."""
        for axis in (self.to_next, self.returning, self.word):
            axis.finish_sending()

    def close(self) -> None:
        """Give back the connections. A collective."""
        for group in self.groups:
            dist.destroy_process_group(group)


def build_mesh(plan: ResolvedPlan, device: torch.device, meter: Meter) -> Mesh:
    """The communicators of this rank. A collective: every rank of the world calls it with the same plan.

    Each communicator is used once by all its members, so that none is created lazily in the middle of a denoise.
    """
    staged = device.type == "cuda" and plan.transport == "gloo"
    backend = "nccl" if plan.transport == "nccl" else "gloo"
    groups = {axis: _group(plan, (axis,), backend) for axis in AXES}
    groups["odd_hops"] = _group(plan, ("pipefusion",), backend) if plan.pipefusion > HOPS else None
    groups["returning"] = _group(plan, ("pipefusion",), backend)
    if plan.ring > 1 and plan.ulysses > 1:
        groups["sequence"] = _group(plan, ("ring", "ulysses"), backend)
    else:  # the same ranks, whose connections take memory
        groups["sequence"] = groups["ring"] if plan.ring > 1 else groups["ulysses"]
    communicators = {
        name: Communicator("pipefusion" if name == "odd_hops" else name, group, device, staged, meter)
        for name, group in groups.items()
    }
    host = torch.device("cpu")
    groups["stage"] = _group(plan, tuple(axis for axis in AXES if axis != "pipefusion"), "gloo")
    groups["word"] = _group(plan, ("pipefusion",), "gloo")
    communicators |= {
        name: Communicator(kind, groups[name], host, False, meter)
        for name, kind in (("stage", "stage"), ("word", "control"))
    }
    for communicator in communicators.values():
        communicator.warm_up()
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # an exchange that hangs, as P2P that does not work does, hangs here
    meter.reset()
    return Mesh(groups=tuple(dict.fromkeys(group for group in groups.values() if group is not None)), **communicators)


def _group(plan: ResolvedPlan, axes: tuple[str, ...], backend: str) -> dist.ProcessGroup | None:
    """The group of the ranks that differ from this one in the given axes only; None if that is this rank alone."""
    if math.prod(getattr(plan, axis) for axis in axes) == 1:
        return None
    alike: dict[Place, list[int]] = {}
    for rank in range(plan.world_size):
        alike.setdefault(plan.place(rank)._replace(**dict.fromkeys(axes, 0)), []).append(rank)
    mine, _ = dist.new_subgroups_by_enumeration(list(alike.values()), timeout=FOREVER, backend=backend)
    return mine
