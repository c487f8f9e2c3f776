"""The rows of a model call's batch: which belong together, and which parts of a call go with some of them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ...conditioning import TOGETHER, in_dict
from ...diffusion import Value
from ...plan import ResolvedPlan

CONTROL = "control"
"""A ControlNet's output among what a call is given: lists that the model's own forward takes from their ends."""

FRAMES = "num_video_frames"
"""ComfyUI's name for how many rows are one video, whose frames attend to each other."""


def rows_a_unit(values: Mapping[str, Value]) -> int:
    """How many rows of a batch belong together, one behind the other."""
    rows = values.get(TOGETHER, values.get(FRAMES, 1))
    return rows if isinstance(rows, int) else 1


def parts_of(plan: ResolvedPlan, batch: int, values: Mapping[str, Value]) -> list[slice]:
    """The rows of a batch that each data rank of a plan computes; those that belong together stay so."""
    unit = rows_a_unit(values) if batch % rows_a_unit(values) == 0 else 1
    return [slice(unit * run.start, unit * run.stop) for run in plan.parts(batch // unit)]


def rows_of(tensors: Mapping[str, Tensor], values: Mapping[str, Value], rows: Tensor) -> dict[str, Tensor]:
    """What a call is given for some rows of its latent `x`, by their numbers. What is for all of them stays."""
    batch = tensors["x"].shape[0]
    return {
        name: tensor.index_select(0, rows.to(tensor.device)) if _by_row(name, tensor, values, batch) else tensor
        for name, tensor in tensors.items()
    }


def _by_row(name: str, tensor: Tensor, values: Mapping[str, Value], batch: int) -> bool:
    """Whether a tensor has a row for each of the batch's; in a dict only a ControlNet's have."""
    free = name.partition(".")[0] != CONTROL and in_dict(name, values)
    return tensor.ndim > 0 and tensor.shape[0] == batch and not free


def run_of(rows: slice) -> Tensor:
    """The numbers of the rows in a run, as an index."""
    return torch.arange(rows.start, rows.stop)
