"""Trials of a model that runs unsharded, with random weights: the time of a forward, and the coupling of batch rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ...comm.device_events import DeviceEvents
from ...diffusion import Value
from ...errors import Refused
from ...models.comfyui.meta_model import keep_type
from ...models.comfyui.model import UnshardedModel
from ...models.comfyui.reduced import randomise_shared
from ...models.comfyui.rows import rows_a_unit, rows_of
from ...models.family import Family, Stage
from ...models.inputs import Inputs
from ...weights.layers.quantised import compute_in

RUNS = 3
"""Runs of each timing, of which the shortest counts."""

ROW_TOLERANCE = 1e-3
"""Largest relative L2 error, in fp32, of rows that are computed alone and together with others."""


def time_forward(family: Family, config: Any, example: ForwardExample) -> tuple[list[float], tuple[int, ...]]:
    """Time a forward of the smallest number of rows that are computed together, and of twice this number.

    All weights are views of a few buffers, so that the timing needs little memory next to the model in use.

    Returns:
        The seconds of both forwards, and their numbers of rows.
    """
    model = _randomly_weighted(family, config, example.dtype, example.device)
    compute_in(model.module, example.x.dtype)
    few = rows_a_unit(example.values)
    counts = few, 2 * few
    return [_time(model, example.rows(count)) for count in counts], counts


def _time(model: UnshardedModel, example: ForwardExample) -> float:
    inputs, events, best = example.inputs("time"), DeviceEvents(example.device), float("inf")
    for _ in range(RUNS):
        events.record()
        model.compute(example.x, inputs, {})
        events.record()
        best = min(best, events.pop_seconds()[1])
        example.on_progress()
    return best


def refuse_coupled_rows(family: Family, config: Any, example: ForwardExample) -> None:
    """Compare rows that are computed alone and together with rows of other inputs, in fp32 with random weights.

    Raises:
        Refused: the results differ, as in a class that swaps the halves of a batch or changes only the first row.
    """
    model = _randomly_weighted(family, replace(config, quantisation={}), torch.float32, example.device)
    count = rows_a_unit(example.values)
    both = _in_fp32(example.rows(2 * count).tensors)
    generator = torch.Generator().manual_seed(0)
    for key, tensor in both.items():
        by_row = tensor.is_floating_point() and tensor.ndim and tensor.shape[0] == 2 * count
        if by_row and key != "timestep" and not _is_mask(tensor):
            drawn = torch.randn(tensor[count:].shape, generator=generator)
            both[key] = torch.cat([tensor[:count], drawn.to(tensor)])
    together = _run(model, replace(example, tensors=both))
    for rows in (torch.arange(count), torch.arange(count, 2 * count)):
        alone = _run(model, replace(example, tensors=rows_of(both, example.values, rows)))
        error = (alone - together[rows]).norm() / alone.norm()
        if not error <= ROW_TOLERANCE:  # also true for NaN
            raise Refused(
                f"a {config.kind} model computes the rows of a batch together, so several workers cannot divide them: "
                "use devices with one GPU in Parallel Plan, or Load Diffusion Model."
            )


def _is_mask(tensor: Tensor) -> bool:
    """Return True for a mask of zeros and ones, which selects positions. Random numbers would select all positions."""
    return bool((tensor == 1).any() and ((tensor == 0) | (tensor == 1)).all())


def _in_fp32(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {key: tensor.float() if tensor.is_floating_point() else tensor for key, tensor in tensors.items()}


def _run(model: UnshardedModel, example: ForwardExample) -> Tensor:
    out = model.compute(example.x, example.inputs("apart"), {})
    example.on_progress()
    return out


def _randomly_weighted(family: Family, config: Any, dtype: torch.dtype, device: torch.device) -> UnshardedModel:
    """Build a model whose parameters are views of buffers of random numbers, one for each kind of parameter.

    Args:
        dtype: the dtype of the weights.
    """
    model = family.build(config, Stage(0, 1, 1))
    assert isinstance(model, UnshardedModel), "its plan shape is unsharded"
    keep_type(model.module, dtype)
    randomise_shared(model.module.to(dtype), device)
    return model


@dataclass(frozen=True)
class ForwardExample:
    """The inputs of one model call, and the device that computes it.

    Attributes:
        device: the rank's device.
        dtype: the dtype of the weights; inputs have the compute dtype.
        tensors: `x`, `timestep` and the conditioning of one forward.
        values: the entries of the conditioning that are not tensors.
        on_progress: called after each step of the work, so that an observer sees the rank make progress.
    """

    device: torch.device
    dtype: torch.dtype
    tensors: Mapping[str, Tensor]
    values: Mapping[str, Value]
    on_progress: Callable[[], None]

    @property
    def x(self) -> Tensor:
        """Return the latent `[batch, channels, ...]`."""
        return self.tensors["x"]

    def rows(self, count: int) -> ForwardExample:
        """Return an example with a batch of `count` rows, which repeat the rows of this one."""
        numbers = torch.arange(count) % self.x.shape[0]
        return replace(self, tensors=rows_of(self.tensors, self.values, numbers))

    def inputs(self, key: str) -> Inputs:
        """Return the inputs besides the latent. `key` identifies the prompts of the call."""
        conditioning = {name: tensor for name, tensor in self.tensors.items() if name not in ("x", "timestep")}
        timestep = self.tensors.get("timestep")
        return Inputs(key, self.x.shape, self.x.dtype, self.device, timestep, conditioning, values=self.values)
