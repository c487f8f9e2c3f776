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
    """Adapters of a file's tensor of `size`, of which a weight has `rows` from its row `offset` on.

    `column_norms` as in `apply`.
    """

    offset: int
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

    def __init__(self, runs: Sequence[AdapterRows], values: Values, adds_in: torch.dtype, held: torch.dtype) -> None:
        super().__init__()
        self._runs = runs
        self._adds_in = adds_in
        self._held = held
        for name in {name for run in runs for adapter in run.adapters for name in adapter.tensors.values()}:
            self.register_buffer(name, values[name], persistent=False)
        for number, run in enumerate(runs):
            for place, norms in run.column_norms.items():
                self.register_buffer(f"norms {number} {place}", norms, persistent=False)

    def forward(self, weight: Tensor) -> Tensor:
        """The weight changed, perhaps in place."""
        weight = weight.to(self._adds_in)
        buffers = dict(self.named_buffers(remove_duplicate=False))  # runs may share norms
        for number, run in enumerate(self._runs):
            norms = {place: buffers[f"norms {number} {place}"] for place in run.column_norms}
            part = weight[run.offset : run.offset + run.rows.stop - run.rows.start]
            apply(run.adapters, buffers, part, run.rows, run.size, norms)
        return weight.to(self._held)
