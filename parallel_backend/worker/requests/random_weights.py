"""A model that runs whole with random weights, which take next to no memory: to see what is so of any weights."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from ...models.comfyui.comfy_family import keep_type
from ...models.comfyui.whole_family import WholeFamily
from ...models.comfyui.whole_model import WholeModel
from ...models.family import Stage

SPREAD = 0.03
"""Of the random numbers of vectors."""

SCALE, BIAS = 0, -1

Kind = tuple[torch.dtype, int]
"""A parameter's type, and of a matrix the power of two next to how many features go into each that it gives; of a vector whether
it is a scale or a bias."""


def randomly_weighted(family: WholeFamily, config: Any, dtype: torch.dtype, device: torch.device) -> WholeModel:
    """One whose parameters are views of a buffer for each of their kinds.

    Args:
        dtype: of the weights.
    """
    model = family.build(config, Stage(0, 1, 1))
    keep_type(model.module, dtype)
    _fill(model.module.to(dtype), device)
    return model


def _fill(module: nn.Module, device: torch.device) -> None:
    """Put a module on the meta device on another, its parameters being views of a buffer for each of their kinds.

    Matrices have random numbers that leave what goes through them as large as it was, scales such about 1 and biases about 0, so
    that what a layer is given matters to what it gives.
    """
    largest: dict[Kind, int] = {}
    for name, parameter in module.named_parameters():
        kind = _kind(name, parameter)
        largest[kind] = max(parameter.numel(), largest.get(kind, 0))
    drawn = {kind: _numbers(*kind, count, device) for kind, count in largest.items()}
    for part in module.modules():
        for name, parameter in list(part.named_parameters(recurse=False)):
            view = drawn[_kind(name, parameter)][: parameter.numel()].view(parameter.shape)
            part.register_parameter(name, nn.Parameter(view, requires_grad=False))
        for name, buffer in list(part.named_buffers(recurse=False)):
            part._buffers[name] = torch.zeros_like(buffer, device=device) if buffer.is_meta else buffer.to(device)


def _kind(name: str, parameter: Tensor) -> Kind:
    if parameter.ndim < 2 or not parameter.numel():
        return parameter.dtype, BIAS if name.endswith("bias") else SCALE
    return parameter.dtype, 1 << round(math.log2(parameter.numel() // parameter.shape[0]))


def _numbers(dtype: torch.dtype, features: int, count: int, device: torch.device) -> Tensor:
    if not dtype.is_floating_point:
        return torch.zeros(count, dtype=dtype, device=device)
    drawn = torch.randn(count, generator=torch.Generator(device).manual_seed(0), device=device)
    if features in (SCALE, BIAS):
        return ((features == SCALE) + SPREAD * drawn).to(dtype)
    return (drawn / features**0.5).to(dtype)
