"""Linear layers that keep the checkpoint's dtype and cast to the activations' dtype where they are used.

This is how ComfyUI's manual cast works, so that a file's precision and the compute dtype stay independent.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class CastLinear(nn.Linear):
    """A linear layer whose weight and bias are cast to the input's dtype."""

    def forward(self, x: Tensor) -> Tensor:
        """`x` times the weight, in `x`'s dtype."""
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return F.linear(x, self.weight.to(x.dtype), bias)


def rms_norm(norm: nn.RMSNorm, x: Tensor) -> Tensor:
    """An RMSNorm module applied with its weight cast to the input's dtype."""
    return F.rms_norm(x, norm.weight.shape, norm.weight.to(x.dtype), norm.eps)


def use_cast_linears(module: nn.Module) -> None:
    """Turn every nn.Linear below a module (on the meta device) into a CastLinear."""
    for child in module.modules():
        if type(child) is nn.Linear:
            child.__class__ = CastLinear


def materialise(module: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
    """Give a module built on the meta device uninitialised parameters of `dtype` on `device`."""
    module.to(dtype).to_empty(device=device)
