"""Adapters on a weight that stays quantised: applied to its values each time they are expanded.

Of blocks, which nothing here can make anew, and of fp8 that ComfyUI expands when it loads: that would take twice the memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .lora import Adapter, Values, apply


@dataclass(frozen=True)
class AdapterRows:
    """Adapters of a file's tensor of `size`; a weight has the `rows` of it.

    `column_norms` as in `apply`.
    """

    rows: slice
    size: Sequence[int]
    adapters: Sequence[Adapter]
    column_norms: Mapping[int, Tensor]


class ExpandedAdapters(nn.Module):
    """From a weight's values (fp32) to changed ones. Its tensors are buffers and so move with the layer.

    Args:
        values: the adapters' tensors, on the weight's device.
        adds_in: the type in which they are added.
        held: the type to which ComfyUI rounds the sum.
    """

    def __init__(self, rows: AdapterRows, values: Values, adds_in: torch.dtype, stored_dtype: torch.dtype) -> None:
        super().__init__()
        self._rows = rows
        self._adds_in = adds_in
        self._stored_dtype = stored_dtype
        for name in {name for adapter in rows.adapters for name in adapter.tensors.values()}:
            self.register_buffer(name, values[name], persistent=False)
        for number, norms in rows.column_norms.items():
            self.register_buffer(f"norms {number}", norms, persistent=False)

    def forward(self, weight: Tensor) -> Tensor:
        """The weight changed, perhaps in place."""
        weight, rows = weight.to(self._adds_in), self._rows
        buffers = dict(self.named_buffers(remove_duplicate=False))  # places may share norms
        norms = {number: buffers[f"norms {number}"] for number in rows.column_norms}
        apply(rows.adapters, buffers, weight, rows.rows, rows.size, norms)
        return weight.to(self._stored_dtype)
