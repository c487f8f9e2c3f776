"""Distribution of a ControlNet's output from rank 0. Each rank gets the residuals of its latent tokens for its blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ....comm.communicator import Communicator
from ....layout import length
from ....plan import ResolvedPlan
from ....wire.to_worker import BlockResiduals
from ...family import Stage
from ...sequence_parallel.placement import Placement


@dataclass(frozen=True)
class ControlShare:
    """One rank's share of the residuals.

    Attributes:
        blocks: the names of the tensors, by the block after which they are added.
        rows: the rank's rows of the batch.
        positions: the positions of the rank's latent tokens.
    """

    blocks: Mapping[int, str]
    rows: slice
    positions: Tensor

    @property
    def names(self) -> list[str]:
        """Return the names of the tensors without duplicates; none for a rank without tokens or rows."""
        return list(dict.fromkeys(self.blocks.values())) if self.positions.numel() and length(self.rows) else []

    def of(self, tensor: Tensor) -> Tensor:
        """Return this rank's share of a tensor `[batch or 1, latent tokens, features]`."""
        rows = tensor if tensor.shape[0] == 1 else tensor[self.rows]
        return rows.index_select(1, self.positions)


def shares(
    residuals: BlockResiduals, plan: ResolvedPlan, stages: Sequence[Stage], tokens: Placement, rows: Sequence[slice]
) -> list[ControlShare]:
    """Return the share of each rank.

    Args:
        stages: the pipeline stage of each rank.
        tokens: the placement of the latent's tokens.
        rows: the rows of the batch that each data and cfg rank computes.
    """
    parts = []
    for rank, stage in enumerate(stages):
        coordinates = plan.coordinates(rank)
        group, sequence = (
            coordinates.data * plan.cfg + coordinates.cfg,
            coordinates.ring * plan.ulysses + coordinates.ulysses,
        )
        blocks = {block: name for block, name in residuals.blocks.items() if stage.start <= block < stage.stop}
        parts.append(ControlShare(blocks, rows[group], tokens.ranks[sequence]))
    return parts


def distribute(
    everyone: Communicator,
    parts: Sequence[ControlShare],
    tensors: Mapping[str, Tensor],
    residuals: BlockResiduals,
    features: int,
) -> dict[int, Tensor]:
    """Return this rank's residuals, on the CPU, by the numbers of its blocks. A collective; only rank 0 has `tensors`."""
    mine = parts[everyone.rank]
    if everyone.rank == 0:
        for rank, part in enumerate(parts[1:], start=1):
            for name in part.names:
                everyone.send(part.of(tensors[name]), rank, "residuals")
        everyone.finish_sending()
        residual_tensors = {name: mine.of(tensors[name]) for name in mine.names}
    else:
        batch = 1 if residuals.batch == 1 else length(mine.rows)
        shape, dtype = (batch, mine.positions.numel(), features), getattr(torch, residuals.dtype)
        residual_tensors = {name: everyone.receive(shape, dtype, 0) for name in mine.names}
    return {block: residual_tensors[name] for block, name in mine.blocks.items() if name in residual_tensors}
