"""How long a forward takes that is not spread: of one item of a batch, and of two."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ...comm.device_events import DeviceEvents
from ...diffusion import Value
from ...models.comfyui.rows import rows_a_unit, rows_of
from ...models.comfyui.whole_family import WholeFamily
from ...models.comfyui.whole_model import WholeModel
from ...models.inputs import Inputs
from ...weights.layers.quantised import compute_in
from .made_up import made_up

RUNS = 3


def time_forward(
    family: WholeFamily,
    config: Any,
    device: torch.device,
    dtype: torch.dtype,
    tensors: Mapping[str, Tensor],
    values: Mapping[str, Value],
    mark: Callable[[], None],
) -> tuple[list[float], tuple[int, ...]]:
    """Seconds, the shortest of some runs, of a forward of so many rows of a batch, and of twice as many; and these numbers.

    The weights are all of the same few numbers, so that a model is timed that has no room beside the one in use.

    Args:
        dtype: of the weights; inputs come in the compute dtype.
        tensors, values: `x`, `timestep` and the conditioning of one forward.
        mark: called after each run, so that a watcher sees that the rank gets on.
    """
    model = made_up(family, config, dtype, device)
    compute_in(model.module, tensors["x"].dtype)
    few = rows_a_unit(values)
    counts = few, 2 * few
    return [_time(model, device, tensors, values, count, mark) for count in counts], counts


def _time(
    model: WholeModel,
    device: torch.device,
    tensors: Mapping[str, Tensor],
    values: Mapping[str, Value],
    count: int,
    mark: Callable[[], None],
) -> float:
    given = rows_of(tensors, values, torch.arange(count) % tensors["x"].shape[0])
    x, timestep = given.pop("x"), given.pop("timestep", None)
    inputs = Inputs("time", x.shape, x.dtype, device, timestep, given, values=values)
    events, best = DeviceEvents(device), float("inf")
    for _ in range(RUNS):
        events.mark()
        model.compute(x, inputs)
        events.mark()
        best = min(best, events.take()[1])
        mark()
    return best
