"""Layers that torch.compile does not look into: what is compiled calls them by their name in the block that runs."""

from __future__ import annotations

from contextvars import ContextVar

import torch
from torch import Tensor, nn

ATTRIBUTE = "runs_as_operator"
"""Of a layer that does: it multiplies by code that a compiler cannot take, or that changes with adapters."""

RUNNING: ContextVar[nn.Module] = ContextVar("running")
"""The block that runs: an operator can be given tensors and plain values only."""


@torch.library.custom_op("comfyui_parallel::layer", mutates_args=())
def layer(x: Tensor, name: str, features: int) -> Tensor:
    """A linear layer of the block that runs, `[..., in_features]` to `[..., features]`, in the type of `x`."""
    out: Tensor = RUNNING.get().get_submodule(name)(x)
    assert out.dtype == x.dtype, "the compiler was told that a layer keeps its input's type"
    return out.contiguous()


@layer.register_fake
def _shape_of_layer(x: Tensor, name: str, features: int) -> Tensor:
    return x.new_empty(*x.shape[:-1], features)


class LayerOperator(nn.Module):
    """Stands in the place of the layer of this name while its block is compiled."""

    def __init__(self, name: str, features: int) -> None:
        super().__init__()
        self.name = name
        self.features = features

    def forward(self, x: Tensor) -> Tensor:
        """What the layer gives."""
        return layer(x, self.name, self.features)


def layer_operators(block: nn.Module) -> dict[str, LayerOperator]:
    """Return the operators that replace layers of a block, by the names of the layers."""
    layers = {name: child for name, child in block.named_modules() if getattr(child, ATTRIBUTE, False)}
    return {name: LayerOperator(name, child.out_features) for name, child in layers.items()}
