"""Whether the rows of a batch can be computed apart: tried with a model's own class before its first split forward."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...errors import Refused
from ...models.comfyui.rows import rows_a_unit, rows_of
from ...models.comfyui.whole_family import WholeFamily
from ...models.comfyui.whole_model import WholeModel
from .example import ForwardExample
from .random_weights import randomly_weighted

ALIKE = 1e-3
"""Relative L2 error of rows in fp32 up to which they are the same alone and beside others."""


def refuse_coupled_rows(family: WholeFamily, config: Any, example: ForwardExample) -> None:
    """Run rows alone and beside others, which are given something else, in fp32: those that come first and those behind.

    Args:
        family, config: whose model is made with random weights.

    Raises:
        Refused: what is computed of them is not the same, as where a class swaps the halves of a batch, or gives the first row
            what belongs to all of them.
    """
    model = randomly_weighted(family, replace(config, quantisation={}), torch.float32, example.device)
    count = rows_a_unit(example.values)
    both = _in_fp32(example.rows(2 * count).tensors)
    generator = torch.Generator().manual_seed(0)
    for key, tensor in both.items():
        by_row = tensor.is_floating_point() and tensor.ndim and tensor.shape[0] == 2 * count
        if by_row and key != "timestep" and not _chooses(tensor):
            drawn = torch.randn(tensor[count:].shape, generator=generator)
            both[key] = torch.cat([tensor[:count], drawn.to(tensor)])
    together = _run(model, replace(example, tensors=both))
    for rows in (torch.arange(count), torch.arange(count, 2 * count)):
        alone = _run(model, replace(example, tensors=rows_of(both, example.values, rows)))
        error = (alone - together[rows]).norm() / alone.norm()
        if not error <= ALIKE:  # NaN is not
            raise Refused(
                f"a {config.kind} model computes the rows of a batch together, so they cannot be computed apart: use devices "
                "with one GPU in Parallel Plan, or Load Diffusion Model."
            )


def _chooses(tensor: Tensor) -> bool:
    """Whether it looks like a mask, which chooses positions: with other numbers in it, it would choose them all."""
    return bool((tensor == 1).any() and ((tensor == 0) | (tensor == 1)).all())


def _in_fp32(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {key: tensor.float() if tensor.is_floating_point() else tensor for key, tensor in tensors.items()}


def _run(model: WholeModel, example: ForwardExample) -> Tensor:
    out = model.compute(example.x, example.inputs("apart"))
    example.on_progress()
    return out
