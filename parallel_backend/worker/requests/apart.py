"""Whether the rows of a batch can be computed apart: tried with a model's own class before its first split forward."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...diffusion import Value
from ...errors import Refused
from ...models.comfyui.rows import rows_a_unit, rows_of
from ...models.comfyui.whole_family import WholeFamily
from ...models.comfyui.whole_model import WholeModel
from ...models.inputs import Inputs
from .made_up import made_up

ALIKE = 1e-3
"""Relative L2 error of rows in fp32 up to which they are the same alone and beside others."""


def refuse_rows_that_meet(
    family: WholeFamily,
    config: Any,
    device: torch.device,
    tensors: Mapping[str, Tensor],
    values: Mapping[str, Value],
    mark: Callable[[], None],
) -> None:
    """Run rows alone and beside others, which are given something else, in fp32: those that come first and those behind.

    Args:
        family, config: whose model is made with made-up weights.
        tensors, values: `x`, `timestep` and the conditioning of one forward.
        mark: called after each forward, so that a watcher sees that the rank gets on.

    Raises:
        Refused: what is computed of them is not the same, as where a class swaps the halves of a batch, or gives the first row
            what belongs to all of them.
    """
    model = made_up(family, replace(config, quantisation={}), torch.float32, device)
    count, batch = rows_a_unit(values), tensors["x"].shape[0]
    both = _in_fp32(rows_of(tensors, values, torch.arange(2 * count) % batch))
    generator = torch.Generator().manual_seed(0)
    for key, tensor in both.items():
        if key != "timestep" and tensor.is_floating_point() and tensor.ndim and tensor.shape[0] == 2 * count:
            drawn = torch.randn(tensor[count:].shape, generator=generator)
            both[key] = torch.cat([tensor[:count], drawn.to(tensor)])
    beside = _run(model, both, values, mark)
    for rows in (torch.arange(count), torch.arange(count, 2 * count)):
        alone = _run(model, rows_of(both, values, rows), values, mark)
        error = (alone - beside[rows]).norm() / alone.norm()
        if not error <= ALIKE:  # NaN is not
            raise Refused(
                f"a {config.kind} model computes the rows of a batch together, so they cannot be computed apart: use devices "
                "with one GPU in Parallel Plan, or Load Diffusion Model."
            )


def _in_fp32(given: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {key: tensor.float() if tensor.is_floating_point() else tensor for key, tensor in given.items()}


def _run(
    model: WholeModel, given: Mapping[str, Tensor], values: Mapping[str, Value], mark: Callable[[], None]
) -> Tensor:
    conditioning = {key: tensor for key, tensor in given.items() if key not in ("x", "timestep")}
    x = given["x"]
    inputs = Inputs("apart", x.shape, x.dtype, x.device, given.get("timestep"), conditioning, values=values)
    out = model.compute(x, inputs)
    mark()
    return out
