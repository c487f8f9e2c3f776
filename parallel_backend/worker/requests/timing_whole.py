"""How long a forward takes that is not spread: of one item of a batch, and of two."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ...comm.moments import Moments
from ...diffusion import Value
from ...models.comfyui.rows import rows_of, together
from ...models.comfyui.whole_family import WholeFamily
from ...models.comfyui.whole_model import WholeModel
from ...models.family import Stage
from ...models.inputs import Inputs
from ...weights.requantised import compute_in

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

    The weights are all of the same few zeros, so that a model is timed that has no room beside the one in use.

    Args:
        dtype: of the weights; inputs come in the compute dtype.
        tensors, values: `x`, `timestep` and the conditioning of one forward.
        mark: called after each run, so that a watcher sees that the rank gets on.
    """
    model = family.build(config, Stage(0, 1, 1))
    compute_in(model.module, tensors["x"].dtype)
    _fill_with_zeros(model.module.to(dtype), device)
    few = together(values)
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
    moments, best = Moments(device), float("inf")
    for _ in range(RUNS):
        moments.mark()
        model.compute(x, inputs)
        moments.mark()
        best = min(best, moments.take()[1])
        mark()
    return best


def _fill_with_zeros(module: nn.Module, device: torch.device) -> None:
    """Put a module on the meta device on another, its parameters being views of one buffer for each of their types."""
    largest: dict[torch.dtype, int] = {}
    for parameter in module.parameters():
        largest[parameter.dtype] = max(parameter.numel(), largest.get(parameter.dtype, 0))
    zeros = {
        dtype: torch.zeros(count * dtype.itemsize, dtype=torch.uint8, device=device).view(dtype)
        for dtype, count in largest.items()
    }
    for part in module.modules():
        for name, parameter in list(part.named_parameters(recurse=False)):
            view = zeros[parameter.dtype][: parameter.numel()].view(parameter.shape)
            part.register_parameter(name, nn.Parameter(view, requires_grad=False))
        for name, buffer in list(part.named_buffers(recurse=False)):
            part._buffers[name] = torch.zeros_like(buffer, device=device) if buffer.is_meta else buffer.to(device)
