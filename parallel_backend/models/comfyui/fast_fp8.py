"""Plain fp8 weights multiplied in fp8, as ComfyUI's `fp8_e4m3fn_fast` does."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ...weights.layers.cast import PackedLinear


@dataclass(frozen=True)
class _Seen:
    """A layer as ComfyUI's method wants it."""

    weight: Tensor
    bias: Tensor | None
    weight_function: tuple[()] = ()
    bias_function: tuple[()] = ()


class FastLinear(PackedLinear):
    """Rounds its input to fp8 and multiplies with its weight as it is; with adapters it expands the weight."""

    runs_as_operator = True

    def forward(self, x: Tensor) -> Tensor:
        """`x` times the weight, in `x`'s dtype."""
        import comfy.ops

        if self.change is None:
            seen = _Seen(self.weight.view(torch.float8_e4m3fn), self.bias)
            out: Tensor = comfy.ops.fp8_ops.Linear.forward_comfy_cast_weights(seen, x)
            return out
        return super().forward(x)


def multiply_in_fp8(module: nn.Module, device: torch.device) -> None:
    """Have every layer multiply in fp8 whose weight is plain fp8_e4m3fn, if ComfyUI would do it on the device."""
    import comfy.model_management

    if not comfy.model_management.supports_fp8_compute(device):
        return
    for child in module.modules():
        if (
            isinstance(child, PackedLinear)
            and child.storage.dtype == torch.float8_e4m3fn
            and child.weight_scale is None
        ):
            child.__class__ = FastLinear
