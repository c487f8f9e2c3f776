"""Layers that ComfyUI multiplies without expanding their weights: what the rest of the engine needs to know of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn

PARTS = "parts"
"""The submodule that has what a quantised weight is made of, by the file's names: weight, weight_scale and so on."""


class QuantisedParts(nn.Module):
    """What a quantised weight is made of: parameters of one dimension, each in the type that the format gives it."""

    def _apply(self, fn, recurse=True):  # type: ignore[no-untyped-def]
        """Parts are moved and never converted: they would lose their meaning."""

        def moved(tensor: Tensor) -> Tensor:
            out: Tensor = fn(tensor)
            return out if out.dtype == tensor.dtype else tensor.to(out.device)

        return super()._apply(moved, recurse)


class QuantisedLayer(Protocol):
    """A layer whose weight is in `parts`.

    `compute_dtype` is the type in which ComfyUI computes: what its values have once they are expanded.
    """

    compute_dtype: torch.dtype
    parts: QuantisedParts

    def values(self, parts: Mapping[str, Tensor]) -> Tensor:
        """The weight's values `[rows, columns]`, of its parts, in the type in which adapters are added."""

    def quantised(self, parts: Mapping[str, Tensor], values: Tensor, name: str) -> dict[str, Tensor]:
        """The parts that change when a weight gets other values, as ComfyUI quantises them under the weight's name."""


def quantised_layers(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Every QuantisedLayer below a module, by name."""
    for name, child in module.named_modules():
        if isinstance(getattr(child, PARTS, None), QuantisedParts):
            yield name, child


def compute_in(module: nn.Module, dtype: torch.dtype) -> None:
    """Tell a model's quantised layers the type in which it computes."""
    for _, layer in quantised_layers(module):
        layer.compute_dtype = dtype


def plain_linears(module: nn.Module, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """What a model with quantised layers holds in the type that it computes in, whatever type is chosen for weights.

    ComfyUI's mixed precision has all parameters of linear layers so that are not quantised.
    """
    layers = dict(quantised_layers(module))
    linears = {name: child for name, child in module.named_modules() if isinstance(child, nn.Linear)} | layers
    return {
        f"{name}.{key}": dtype
        for name, child in linears.items()
        if layers
        for key, _ in child.named_parameters(recurse=False)
    }
