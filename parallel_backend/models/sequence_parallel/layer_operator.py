"""Layers that torch.compile does not look into. Compiled code calls such a layer by its name in the running block."""

from __future__ import annotations

from contextvars import ContextVar

import torch
from torch import Tensor, nn

ATTRIBUTE = "runs_as_operator"
"""The attribute of a layer that runs as an operator. Its code cannot be compiled, or changes with adapters."""

RUNNING: ContextVar[nn.Module] = ContextVar("running")
"""The block that runs. An operator takes only tensors and plain values as arguments."""


@torch.library.custom_op("comfyui_parallel::layer", mutates_args=())
def layer(x: Tensor, name: str, features: int) -> Tensor:
    """Apply a linear layer of the running block: `[..., in_features]` to `[..., features]`, in the dtype of `x`."""
    out: Tensor = RUNNING.get().get_submodule(name)(x)
    assert out.dtype == x.dtype, "the compiler was told that a layer keeps its input's type"
    return out.contiguous()


@layer.register_fake
def _shape_of_layer(x: Tensor, name: str, features: int) -> Tensor:
    return x.new_empty(*x.shape[:-1], features)


class LayerOperator(nn.Module):
    """A module that replaces the layer of this name while its block is compiled."""

    def __init__(self, name: str, features: int) -> None:
        super().__init__()
        self.name = name
        self.features = features

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's result."""
        return layer(x, self.name, self.features)


def layer_operators(block: nn.Module) -> dict[str, LayerOperator]:
    """Return the operators that replace layers of a block, by the names of the layers."""
    layers = {name: child for name, child in block.named_modules() if getattr(child, ATTRIBUTE, False)}
    return {name: LayerOperator(name, child.out_features) for name, child in layers.items()}
