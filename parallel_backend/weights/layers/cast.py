"""Layers whose weights are cast or expanded to the activations' dtype where they are used.

This is how ComfyUI's manual cast works, so that a file's precision and the compute dtype stay independent.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..formats import Storage


class CastLinear(nn.Linear):
    """A linear layer whose weight and bias are cast to the input's dtype.

    `full_weight` is the one way to the weight's values: also code that changes them for a time (LoRA) goes by it. Under
    sharding it is whole only inside `BlockAccess.block`.
    """

    def full_weight(self, dtype: torch.dtype) -> Tensor:
        """The weight's values `[out_features, in_features]` in a float type; the parameter itself where it has it."""
        return self.weight.to(dtype)

    def forward(self, input: Tensor) -> Tensor:
        """`input` times the weight, in its dtype."""
        bias = None if self.bias is None else self.bias.to(input.dtype)
        return F.linear(input, self.full_weight(input.dtype), bias)


class PackedLinear(CastLinear):
    """A linear layer whose weight stays quantised.

    `weight` holds the stored bytes of its rows `[out_features, bytes]` (uint8). `weight_scale` is None or
    `[out_features, 1]` (fp32), a factor for each row. Rows are independent of each other, so a fused tensor's rows or a
    shard's are packed like a whole weight's.
    """

    storage: Storage
    weight_scale: nn.Parameter | None
    change: nn.Module | None
    """Adapters: from the weight's values in fp32 to others."""

    @property
    def runs_as_operator(self) -> bool:
        """Whether torch.compile does not look into it: adapters come and go, and their strengths are no tensors."""
        return self.change is not None

    def full_weight(self, dtype: torch.dtype) -> Tensor:
        """The weight's values `[out_features, in_features]` in a float type, expanded into a new tensor."""
        if self.change is None:
            return self.expand(self.weight, self.weight_scale, dtype)
        changed: Tensor = self.change(self.expand(self.weight, self.weight_scale, torch.float32))
        return changed.to(dtype)

    def expand(self, weight: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
        """The values of a weight that is packed as this layer's."""
        values = self.storage.expand(weight, dtype)
        return values if scale is None else values * scale.to(dtype)


class CastConv2d(nn.Conv2d):
    """A convolution whose weight and bias are cast to the input's dtype."""

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return super()._conv_forward(input, weight.to(input.dtype), None if bias is None else bias.to(input.dtype))


class CastLayerNorm(nn.LayerNorm):
    """A LayerNorm whose weight and bias, if it has such, are cast to the input's dtype."""

    def forward(self, input: Tensor) -> Tensor:
        """The normalised input."""
        weight, bias = (None if part is None else part.to(input.dtype) for part in (self.weight, self.bias))
        return F.layer_norm(input, self.normalized_shape, weight, bias, self.eps)


CAST: Mapping[type[nn.Module], type[nn.Module]] = MappingProxyType(
    {nn.Linear: CastLinear, nn.Conv2d: CastConv2d, nn.LayerNorm: CastLayerNorm}
)


def use_cast_layers(module: nn.Module) -> None:
    """Have every layer below a module (on the meta device) cast its weights to what it is given."""
    for child in module.modules():
        child.__class__ = CAST.get(type(child), type(child))


def use_cast_tables(module: nn.Module) -> None:
    """Have a module that computes with parameters of its own (PixArt's tables) cast them to the dtype of `hidden_states`."""
    kind: Any = type(module)
    module.__class__ = _with_cast_tables(kind, tuple(module._parameters))


@functools.cache
def _with_cast_tables(kind: type[nn.Module], names: tuple[str, ...]) -> type[nn.Module]:
    """A class each, so that torch.compile takes all modules of one kind for one."""
    run: Any = (
        kind.forward
    )  # read here: from 2.14 on torch.compile does not, where diffusers has it take the class whole

    @functools.wraps(run)
    def forward(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        self.computes_in = hidden_states.dtype
        try:
            return run(self, hidden_states, *args, **kwargs)
        finally:
            self.computes_in = None

    def cast(name: str) -> property:  # not into its __dict__, which torch.compile refuses
        def table(self: Any) -> Tensor:
            dtype, parameter = self.computes_in, self._parameters[name]
            return parameter if dtype is None else parameter.to(dtype)  # type: ignore[no-any-return]

        return property(table)

    tables = {name: cast(name) for name in names}
    return type(
        kind.__name__, (kind,), {"forward": forward, "computes_in": None, "__module__": kind.__module__, **tables}
    )


def materialise(module: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
    """Give a module built on the meta device uninitialised parameters of `dtype` on `device`."""
    module.to(dtype).to_empty(device=device)


def pack(linear: nn.Linear, storage: Storage, scaled: bool) -> None:
    """Turn a linear layer on the meta device into a PackedLinear."""
    linear.__class__ = PackedLinear
    assert isinstance(linear, PackedLinear)
    linear.storage = storage
    linear.register_module("change", None)
    width = storage.row_bytes(linear.in_features)
    linear.weight = _parameter(torch.empty(linear.out_features, width, dtype=torch.uint8, device="meta"))
    scale = torch.empty(linear.out_features, 1, dtype=torch.float32, device="meta")
    linear.register_parameter("weight_scale", _parameter(scale) if scaled else None)


def _parameter(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)
