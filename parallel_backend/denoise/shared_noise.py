"""Fresh noise for all ranks, drawn on one of them.

CUDA's generator gives other numbers on another kind of card, so ranks that draw for themselves would not agree. The rank
that answers the host draws: the first of the last stage, which without PipeFusion is the plan's first device. Its noise goes
to the first rank of every data group, from there to the other side of CFG, and from there to all that hold the sequence;
everyone gets its rows of the batch alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..comm.communicator import Communicator
from ..mesh import Mesh
from ..models.region import Region
from .noise import Draw

KIND = "noise"
"""What the meter calls this traffic."""


@dataclass(frozen=True)
class SharedNoise:
    """Gives the ranks of the last stage their part of what one of them draws. A collective of these ranks.

    `shape` is the whole latent's, `rows` are the runs of its batch, one a data rank, and `patch` is what a sampler holds.
    """

    mesh: Mesh
    shape: Sequence[int]
    rows: Sequence[slice]
    patch: Region

    def __call__(self, draw: Draw) -> Tensor:
        """This rank's rows of the patch, of one draw."""
        mesh = self.mesh
        assert mesh.is_last_stage, "only the last stage runs samplers"
        parts = [self.patch.of(torch.empty(self.shape, device="meta")[rows]) for rows in self.rows]
        mine = parts[mesh.data.rank]
        noise: Tensor | None = None
        if mesh.replies_to_host:
            drawn = draw()
            noise = torch.cat([self.patch.of(drawn[rows]).flatten() for rows in self.rows])
        if mesh.cfg.rank == mesh.sequence.rank == 0:
            noise = mesh.data.scatter(noise, [part.numel() for part in parts], KIND)
        if mesh.sequence.rank == 0:
            noise = _to_all(mesh.cfg, noise, mine.numel(), KIND)
        return _to_all(mesh.sequence, noise, mine.numel(), KIND).view(mine.shape)


def _to_all(axis: Communicator, noise: Tensor | None, count: int, kind: str) -> Tensor:
    """Rank 0's tensor of `count` elements on every rank of an axis."""
    return axis.scatter(None if noise is None else noise.repeat(axis.size), [count] * axis.size, kind)
