"""The rows of a model call's batch: rows that must stay together, and the inputs that belong to some of the rows."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ...conditioning import TOGETHER, in_dict
from ...diffusion import Value
from ...plan import ResolvedPlan

CONTROL = "control"
"""The input with a ControlNet's output: lists from whose ends the model's own forward takes tensors."""

FRAMES = "num_video_frames"
"""ComfyUI's name for the number of rows that are one video, whose frames attend to each other."""


def rows_a_unit(values: Mapping[str, Value]) -> int:
    """Return the number of consecutive rows of a batch that must stay together."""
    rows = values.get(TOGETHER, values.get(FRAMES, 1))
    return rows if isinstance(rows, int) else 1


def parts_of(plan: ResolvedPlan, batch: int, values: Mapping[str, Value]) -> list[slice]:
    """Return the rows of a batch that each data rank of a plan computes. Rows that must stay together do."""
    unit = rows_a_unit(values) if batch % rows_a_unit(values) == 0 else 1
    return [slice(unit * run.start, unit * run.stop) for run in plan.parts(batch // unit)]


def rows_of(tensors: Mapping[str, Tensor], values: Mapping[str, Value], rows: Tensor) -> dict[str, Tensor]:
    """Return the inputs of a call for some rows of its latent `x`. Inputs for the whole batch stay as they are.

    Args:
        tensors: the inputs, with the latent `x`.
        rows: the numbers of the rows.
    """
    batch = tensors["x"].shape[0]
    return {
        name: tensor.index_select(0, rows.to(tensor.device)) if _by_row(name, tensor, values, batch) else tensor
        for name, tensor in tensors.items()
    }


def _by_row(name: str, tensor: Tensor, values: Mapping[str, Value], batch: int) -> bool:
    """Return True if a tensor has a row for each row of the batch. Among tensors in dicts, only a ControlNet's have."""
    free = name.partition(".")[0] != CONTROL and in_dict(name, values)
    return tensor.ndim > 0 and tensor.shape[0] == batch and not free


def run_of(rows: slice) -> Tensor:
    """Return the numbers of a range of rows as an index tensor."""
    return torch.arange(rows.start, rows.stop)
