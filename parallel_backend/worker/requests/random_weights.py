"""A model that runs whole with random weights, which take next to no memory: to see what is so of any weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ...models.comfyui.whole_family import WholeFamily
from ...models.comfyui.whole_model import WholeModel
from ...models.family import Stage

SPREAD = 0.03
"""Of the random numbers: about what layers of a thousand features have."""


def randomly_weighted(family: WholeFamily, config: Any, dtype: torch.dtype, device: torch.device) -> WholeModel:
    """One whose parameters are views of a buffer for each of their types.

    Matrices have small random numbers and vectors such about 1, so that what a layer is given matters to what it gives.

    Args:
        dtype: of the weights.
    """
    model = family.build(config, Stage(0, 1, 1))
    _fill(model.module.to(dtype), device)
    return model


def _fill(module: nn.Module, device: torch.device) -> None:
    """Put a module on the meta device on another, its parameters being views of a buffer for each of their types.

    Matrices have small random numbers and vectors such about 1, so that what a layer is given matters to what it gives.
    """
    largest: dict[tuple[torch.dtype, bool], int] = {}
    for parameter in module.parameters():
        key = parameter.dtype, parameter.ndim > 1
        largest[key] = max(parameter.numel(), largest.get(key, 0))
    drawn = {key: _numbers(*key, count, device) for key, count in largest.items()}
    for part in module.modules():
        for name, parameter in list(part.named_parameters(recurse=False)):
            view = drawn[parameter.dtype, parameter.ndim > 1][: parameter.numel()].view(parameter.shape)
            part.register_parameter(name, nn.Parameter(view, requires_grad=False))
        for name, buffer in list(part.named_buffers(recurse=False)):
            part._buffers[name] = torch.zeros_like(buffer, device=device) if buffer.is_meta else buffer.to(device)


def _numbers(dtype: torch.dtype, matrices: bool, count: int, device: torch.device) -> Tensor:
    if not dtype.is_floating_point:
        return torch.zeros(count, dtype=dtype, device=device)
    drawn = torch.randn(count, generator=torch.Generator(device).manual_seed(0), device=device) * SPREAD
    return (drawn if matrices else 1 + drawn).to(dtype)
