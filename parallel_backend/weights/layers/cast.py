"""Layers whose weights are cast or expanded to the activations' dtype where they are used.

ComfyUI's manual cast does the same. It keeps a file's precision and the compute dtype independent.
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
    """A linear layer that casts its weight and bias to the input's dtype.

    `full_weight` is the only way to the weight's values, so that `PackedLinear` can apply adapters (LoRA) there. In a sharded
    store the weight is whole only inside `BlockAccess.block`.
    """

    def full_weight(self, dtype: torch.dtype) -> Tensor:
        """Return the weight's values `[out_features, in_features]` in a float dtype.

        A parameter of that dtype is not copied.
        """
        return self.weight.to(dtype)

    def forward(self, input: Tensor) -> Tensor:
        """Multiply the input by the weight, in the input's dtype."""
        bias = None if self.bias is None else self.bias.to(input.dtype)
        return F.linear(input, self.full_weight(input.dtype), bias)


class PackedLinear(CastLinear):
    """A linear layer whose weight stays quantised.

    Attributes:
        weight: the stored bytes of the rows, `[out_features, bytes]` (uint8). Rows are independent of each other, so the rows
            of a fused tensor or of a shard are packed like those of a whole weight.
        weight_scale: a factor for each row, `[out_features, 1]` (fp32), or None.
    """

    storage: Storage
    weight_scale: nn.Parameter | None
    change: nn.Module | None
    """A module of adapters that maps the weight's values in fp32 to other values, or None."""

    @property
    def runs_as_operator(self) -> bool:
        """Return True if torch.compile must not look inside. Adapters come and go, and their strengths are no tensors."""
        return self.change is not None

    def full_weight(self, dtype: torch.dtype) -> Tensor:
        """Return the weight's values `[out_features, in_features]` in a float dtype, expanded into a new tensor."""
        if self.change is None:
            return self.expand(self.weight, self.weight_scale, dtype)
        changed: Tensor = self.change(self.expand(self.weight, self.weight_scale, torch.float32))
        return changed.to(dtype)

    def expand(self, weight: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Return the values of a weight that is packed like this layer's weight."""
        values = self.storage.expand(weight, dtype)
        return values if scale is None else values * scale.to(dtype)


class CastConv2d(nn.Conv2d):
    """A convolution that casts its weight and bias to the input's dtype."""

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return super()._conv_forward(input, weight.to(input.dtype), None if bias is None else bias.to(input.dtype))


class CastLayerNorm(nn.LayerNorm):
    """A LayerNorm that casts its weight and bias, if it has any, to the input's dtype."""

    def forward(self, input: Tensor) -> Tensor:
        """Normalise the input."""
        weight, bias = (None if part is None else part.to(input.dtype) for part in (self.weight, self.bias))
        return F.layer_norm(input, self.normalized_shape, weight, bias, self.eps)


CAST: Mapping[type[nn.Module], type[nn.Module]] = MappingProxyType(
    {nn.Linear: CastLinear, nn.Conv2d: CastConv2d, nn.LayerNorm: CastLayerNorm}
)


def use_cast_layers(module: nn.Module) -> None:
    """Make every layer below a module (on the meta device) cast its weights to the dtype of its input."""
    for child in module.modules():
        child.__class__ = CAST.get(type(child), type(child))


def use_cast_tables(module: nn.Module) -> None:
    """Make a module that computes with parameters of its own (PixArt's tables) cast them to the dtype of `hidden_states`."""
    kind: Any = type(module)
    module.__class__ = _with_cast_tables(kind, tuple(module._parameters))


@functools.cache
def _with_cast_tables(kind: type[nn.Module], names: tuple[str, ...]) -> type[nn.Module]:
    """Return a class that casts the named parameters. One class per kind makes torch.compile treat its modules alike."""
    run: Any = (
        kind.forward
    )  # read here: torch.compile from 2.14 on does not read it in a class that diffusers compiles whole

    @functools.wraps(run)
    def forward(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        self.computes_in = hidden_states.dtype
        try:
            return run(self, hidden_states, *args, **kwargs)
        finally:
            self.computes_in = None

    def cast(name: str) -> property:  # a property: torch.compile refuses an entry in the module's __dict__
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
