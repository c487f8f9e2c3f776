"""The device mesh: a rank's communicators, one for each axis of `MeshAxis`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from .comm.communicator import Communicator
from .comm.meter import Meter
from .mesh_axes import PLAN_AXES, SEQUENCE_AXES, MeshAxis
from .plan import MeshCoordinates, ResolvedPlan

NO_TIMEOUT = timedelta(days=365)
"""The timeout of collectives. Ranks wait in a collective while no prompt runs, and the host watches for hangs."""

MAX_STAGES_ONE_SENDER = 2
"""The largest number of pipeline stages of which only the first sends activations."""


@dataclass(frozen=True)
class Mesh:
    """The communicators of one rank, named after `MeshAxis`.

    A communicator does one operation after another. So even and odd stages send activations on two communicators, `pipefusion`
    and `pipefusion_odd`: a receive that a stage has started must not delay the stage's sends.

    Ranks of `sequence` are ordered as in `layout.SequenceSplit`. `stage` and `cancel_flag` take CPU tensors.
    """

    data: Communicator
    cfg: Communicator
    pipefusion: Communicator
    pipefusion_odd: Communicator
    latent_return: Communicator
    ring: Communicator
    ulysses: Communicator
    sequence: Communicator
    stage: Communicator
    cancel_flag: Communicator
    groups: tuple[dist.ProcessGroup, ...]

    @property
    def is_first_stage(self) -> bool:
        """Return True if this rank belongs to the first pipeline stage."""
        return self.pipefusion.rank == 0

    @property
    def is_last_stage(self) -> bool:
        """Return True if this rank belongs to the last pipeline stage."""
        return self.pipefusion.rank == self.pipefusion.size - 1

    @property
    def reads_latent(self) -> bool:
        """Return True if this rank's stage runs the model's layers before or after the blocks, which read the latent."""
        return self.is_first_stage or self.is_last_stage

    @property
    def to_next_stage(self) -> Communicator:
        """Return the communicator that sends this stage's activations."""
        return self.pipefusion_odd if self.pipefusion.rank % 2 else self.pipefusion

    @property
    def from_previous_stage(self) -> Communicator:
        """Return the communicator that receives the previous stage's activations."""
        return self.pipefusion if self.pipefusion.rank % 2 else self.pipefusion_odd

    @property
    def replies_to_host(self) -> bool:
        """Return True on the one rank that replies to the host: the first rank of the last stage."""
        return self.is_last_stage and self.sequence.rank == self.cfg.rank == self.data.rank == 0

    def finish_sending(self) -> None:
        """Wait until all tensors for other stages have left."""
        for communicator in (self.to_next_stage, self.latent_return, self.cancel_flag):
            communicator.finish_sending()

    def close(self) -> None:
        """Destroy the process groups. A collective."""
        for group in self.groups:
            dist.destroy_process_group(group)


def build_mesh(plan: ResolvedPlan, device: torch.device, meter: Meter) -> Mesh:
    """Create the communicators of this rank. A collective: every rank of the world calls it with the same plan.

    Each communicator exchanges test data here, so that no connection is opened in the middle of a denoise.

    Args:
        plan: the sizes of the axes and the transport.
        device: the device of this rank.
        meter: counts bytes and waits; it is reset at the end.
    """
    staged = device.type == "cuda" and plan.transport == "gloo"
    backend = "nccl" if plan.transport == "nccl" else "gloo"
    groups = {axis: _process_group(plan, (axis,), backend) for axis in PLAN_AXES}
    several_senders = plan.pipefusion > MAX_STAGES_ONE_SENDER
    groups[MeshAxis.PIPEFUSION_ODD] = _process_group(plan, (MeshAxis.PIPEFUSION,), backend) if several_senders else None
    groups[MeshAxis.LATENT_RETURN] = _process_group(plan, (MeshAxis.PIPEFUSION,), backend)
    if plan.ring > 1 and plan.ulysses > 1:
        groups[MeshAxis.SEQUENCE] = _process_group(plan, SEQUENCE_AXES, backend)
    else:  # the same ranks: share the group, because connections take memory
        groups[MeshAxis.SEQUENCE] = groups[MeshAxis.RING if plan.ring > 1 else MeshAxis.ULYSSES]
    communicators = {axis: Communicator(axis.traffic, group, device, staged, meter) for axis, group in groups.items()}
    stage_axes = [axis for axis in PLAN_AXES if axis is not MeshAxis.PIPEFUSION]
    host_groups = {
        MeshAxis.STAGE: _process_group(plan, stage_axes, "gloo"),
        MeshAxis.CANCEL_FLAG: _process_group(plan, (MeshAxis.PIPEFUSION,), "gloo"),
    }
    cpu = torch.device("cpu")
    communicators |= {axis: Communicator(axis.traffic, group, cpu, False, meter) for axis, group in host_groups.items()}
    for communicator in communicators.values():
        communicator.warm_up()
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # if P2P does not work, the exchange of test data hangs here
    meter.reset()
    distinct = dict.fromkeys(group for group in (groups | host_groups).values() if group is not None)
    return Mesh(groups=tuple(distinct), **{axis.value: communicator for axis, communicator in communicators.items()})


def _process_group(plan: ResolvedPlan, axes: Sequence[MeshAxis], backend: str) -> dist.ProcessGroup | None:
    """Return the group of the ranks whose coordinates differ from this rank's along `axes` only; None for this rank alone."""
    if math.prod(getattr(plan, axis) for axis in axes) == 1:
        return None
    ranks_by_position: dict[MeshCoordinates, list[int]] = {}
    for rank in range(plan.world_size):
        position = plan.coordinates(rank)._replace(**{axis.value: 0 for axis in axes})
        ranks_by_position.setdefault(position, []).append(rank)
    members = list(ranks_by_position.values())
    group, _ = dist.new_subgroups_by_enumeration(members, timeout=NO_TIMEOUT, backend=backend)
    return group
