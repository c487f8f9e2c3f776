"""One forward of a model on a device, to time or to try it without the model's weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...diffusion import Value
from ...models.comfyui.rows import rows_of
from ...models.inputs import Inputs


@dataclass(frozen=True)
class ForwardExample:
    """What a model is given, and where it runs.

    Attributes:
        device: where.
        dtype: of the weights; inputs come in the compute dtype.
        tensors, values: `x`, `timestep` and the conditioning of one forward.
        on_progress: called as it gets on, so that a watcher sees that the rank does.
    """

    device: torch.device
    dtype: torch.dtype
    tensors: Mapping[str, Tensor]
    values: Mapping[str, Value]
    on_progress: Callable[[], None]

    @property
    def x(self) -> Tensor:
        """The latent `[batch, channels, ...]`."""
        return self.tensors["x"]

    def rows(self, count: int) -> ForwardExample:
        """The same for a batch of `count` rows, which are its own, again and again."""
        numbers = torch.arange(count) % self.x.shape[0]
        return replace(self, tensors=rows_of(self.tensors, self.values, numbers))

    def inputs(self, key: str) -> Inputs:
        """What goes with the latent, under a key of its own."""
        conditioning = {name: tensor for name, tensor in self.tensors.items() if name not in ("x", "timestep")}
        timestep = self.tensors.get("timestep")
        return Inputs(key, self.x.shape, self.x.dtype, self.device, timestep, conditioning, values=self.values)
