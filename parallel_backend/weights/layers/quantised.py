"""Layers that ComfyUI multiplies without expanding their weights: the interface that the rest of the engine uses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn

PARTS = "parts"
"""Name of the submodule with the parts of a quantised weight, which have the file's names: weight, weight_scale and so on."""


class QuantisedParts(nn.Module):
    """The parts of a quantised weight: parameters of one dimension, each in the dtype that the format gives it."""

    def _apply(self, fn, recurse=True):  # type: ignore[no-untyped-def]
        """Move the parts and never convert them: they would lose their meaning."""

        def moved(tensor: Tensor) -> Tensor:
            out: Tensor = fn(tensor)
            return out if out.dtype == tensor.dtype else tensor.to(out.device)

        return super()._apply(moved, recurse)


class QuantisedLayer(Protocol):
    """A layer whose weight is in `parts`.

    Attributes:
        compute_dtype: the dtype in which ComfyUI computes, which expanded values have.
    """

    compute_dtype: torch.dtype
    parts: QuantisedParts

    def values(self, parts: Mapping[str, Tensor]) -> Tensor:
        """Return the weight's values `[rows, columns]` from its parts, in the dtype in which adapters are added."""

    def quantised(self, parts: Mapping[str, Tensor], values: Tensor, name: str) -> dict[str, Tensor]:
        """Return the parts that change when a weight gets other values, as ComfyUI quantises them under the weight's name."""


def quantised_layers(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield every QuantisedLayer below a module, with its name."""
    for name, child in module.named_modules():
        if isinstance(getattr(child, PARTS, None), QuantisedParts):
            yield name, child


def compute_in(module: nn.Module, dtype: torch.dtype) -> None:
    """Tell a model's quantised layers the dtype in which the model computes."""
    for _, layer in quantised_layers(module):
        layer.compute_dtype = dtype


def plain_linears(module: nn.Module, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """Return the parameters that a model with quantised layers holds in its compute dtype, whatever dtype weights have.

    In ComfyUI's mixed precision these are all parameters of linear layers that are not quantised.
    """
    layers = dict(quantised_layers(module))
    linears = {name: child for name, child in module.named_modules() if isinstance(child, nn.Linear)} | layers
    return {
        f"{name}.{key}": dtype
        for name, child in linears.items()
        if layers
        for key, _ in child.named_parameters(recurse=False)
    }
