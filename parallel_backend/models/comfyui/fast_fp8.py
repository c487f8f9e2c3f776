"""Linear layers that multiply plain fp8 weights in fp8, as ComfyUI's `fp8_e4m3fn_fast` does."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ...weights.layers.cast import PackedLinear


@dataclass(frozen=True)
class _Seen:
    """The attributes of a layer that ComfyUI's method reads."""

    weight: Tensor
    bias: Tensor | None
    weight_function: tuple[()] = ()
    bias_function: tuple[()] = ()


class FastLinear(PackedLinear):
    """A linear layer that rounds its input to fp8 and multiplies it with the fp8 weight.

    With adapters, the layer expands the weight instead.
    """

    runs_as_operator = True

    def forward(self, x: Tensor) -> Tensor:
        """Return `x` times the weight, in `x`'s dtype."""
        import comfy.ops

        if self.change is None:
            seen = _Seen(self.weight.view(torch.float8_e4m3fn), self.bias)
            out: Tensor = comfy.ops.fp8_ops.Linear.forward_comfy_cast_weights(seen, x)
            return out
        return super().forward(x)


def multiply_in_fp8(module: nn.Module, device: torch.device) -> None:
    """Make every layer with a plain fp8_e4m3fn weight multiply in fp8, if ComfyUI would do so on the device."""
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
