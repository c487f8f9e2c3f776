"""The names of the device mesh's axes, which only this file defines."""

from __future__ import annotations

from enum import Enum
from typing import Any


class MeshAxis(str, Enum):
    """An axis of the device mesh.

    A member's value is the name of the axis in plans, nodes and logs, and the name of its communicator in `mesh.Mesh`.

    Naming:
        - The axes of a plan are named after the parallelism that they carry. They are ordered from outermost (slowest links) to
          innermost (fastest links), and their sizes multiply to the number of ranks.
        - The other axes have the same ranks as one or several axes of a plan. They exist because a communicator carries one kind
          of traffic, in order.
    """

    DATA = "data"
    """Ranks that compute different rows of the batch."""

    CFG = "cfg"
    """Ranks that compute the positive and the negative prompt."""

    PIPEFUSION = "pipefusion"
    """Pipeline stages of the model's blocks; the communicator sends activations from even stages to the next stage."""

    RING = "ring"
    """Ranks that pass keys and values round a ring (Ring Attention)."""

    ULYSSES = "ulysses"
    """Ranks that exchange tokens for heads (DeepSpeed-Ulysses)."""

    PIPEFUSION_ODD = "pipefusion_odd"
    """The ranks of `pipefusion`; sends activations from odd stages to the next stage."""

    LATENT_RETURN = "latent_return"
    """The ranks of `pipefusion`; sends latents from the last stage to the first."""

    SEQUENCE = "sequence"
    """The ranks of `ring` x `ulysses`, which share one sequence of tokens."""

    STAGE = "stage"
    """All ranks of one pipeline stage; sends CPU tensors."""

    CANCEL_FLAG = "cancel_flag"
    """The ranks of `pipefusion`; sends a flag on the CPU from stage to stage that says whether the user cancelled the run."""

    __str__ = str.__str__

    @property
    def traffic(self) -> str:
        """Return the name under which the meter counts this axis's bytes and waits."""
        if self is MeshAxis.PIPEFUSION_ODD:
            return MeshAxis.PIPEFUSION.value
        return CONTROL if self is MeshAxis.CANCEL_FLAG else self.value


CONTROL = "control"
"""The meter's name for flags and counts that ranks exchange through their CPUs. They are not tensors of the model."""

PLAN_AXES = (MeshAxis.DATA, MeshAxis.CFG, MeshAxis.PIPEFUSION, MeshAxis.RING, MeshAxis.ULYSSES)
"""The axes whose sizes a plan sets, from outermost to innermost."""

SEQUENCE_AXES = (MeshAxis.RING, MeshAxis.ULYSSES)
"""The axes over which the tokens of a sequence are sharded."""


def mesh_degrees(**degrees: int) -> dict[str, Any]:
    """Return the size of each axis of a plan by name; axes without an argument have size 1."""
    return {axis.value: 1 for axis in PLAN_AXES} | degrees
