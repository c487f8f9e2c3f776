"""Timing one block of each kind of a model on this rank, on a small model of the same widths without its weights."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor

from ..comm.meter import Meter
from ..denoise.stage import Inputs, StageForward
from ..mesh import build_mesh
from ..models.family import Family, Stage
from ..plan import AXES, ResolvedPlan
from ..weights.holding import Replicated
from ..weights.layers import materialise

RUNS = 3


def time_blocks(
    family: Family,
    config: Any,
    plan: ResolvedPlan,
    device: torch.device,
    dtype: torch.dtype,
    tensors: dict[str, Tensor],
) -> tuple[list[float], tuple[int, ...]]:
    """Seconds of one block of each kind, the shortest of some runs, and how many of each the model has.

    Args:
        plan: its attention kernel is used.
        dtype: of the weights; inputs come in the compute dtype.
        tensors: `x`, `timestep` and the conditioning of one forward.
    """
    small, counts = family.two_of_each(config)
    blocks = 2 * len(counts)
    model = family.build(small, Stage(0, blocks, blocks))
    materialise(model.module, dtype, device)
    for parameter in model.module.parameters():
        parameter.zero_()
    meter = Meter()
    alone = msgspec.structs.replace(plan, devices=plan.devices[:1], patches=1, **dict.fromkeys(AXES, 1))
    marks: list[float] = []

    def mark() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        marks.append(time.perf_counter())

    conditioning = {name: tensor for name, tensor in tensors.items() if name not in ("x", "timestep")}
    x = tensors["x"]
    inputs = Inputs("time", x.shape, x.dtype, device, tensors["timestep"], conditioning)
    forward = StageForward(model, build_mesh(alone, device, meter), alone, Replicated(), mark)
    for _ in range(RUNS):
        forward(inputs, x, None)
    return _second_of_each(marks, blocks), counts


def _second_of_each(marks: Sequence[float], blocks: int) -> list[float]:
    """The time between the marks of a kind's two blocks; the first also has what comes before it."""
    runs = [marks[start : start + blocks] for start in range(0, len(marks), blocks)]
    return [min(run[first + 1] - run[first] for run in runs) for first in range(0, blocks, 2)]
