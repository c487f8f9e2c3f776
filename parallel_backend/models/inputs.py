"""The inputs of a model's forward that every pipeline stage has, and the parts of a latent."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from ..diffusion import Value


class PatchForward(NamedTuple):
    """The forward of one patch.

    Attributes:
        key: the key of its inputs.
        patch: the number of the patch.
    """

    key: Hashable
    patch: int


@dataclass(frozen=True)
class Inputs:
    """All inputs of a forward but the latent.

    Attributes:
        key: identifies the prompts. Values that are cached for one key are not used for another.
        shape: the shape of the latent, `[batch, channels, ...]`.
        dtype: the compute dtype.
        device: the device on which the rank computes.
        timestep: `[batch]` in fp32; None where the conditioning has several.
        conditioning: tensors by the model's names, in the compute dtype.
        residuals: a ControlNet's output for this rank's latent tokens, by the number of the block of this stage after which it
            is added.
        values: the entries of the conditioning that are not tensors.
        processed: True if ComfyUI's model class has already transformed the timestep.
        next_forward: the patch's forward that comes after this one, if it is known.
        sigmas: the sigmas of the call (one is enough) and the sigmas of all steps; both 1-D in fp32.
        branches: the branch of each prompt in the batch (0 for the positive prompts); empty if unknown.
    """

    key: Hashable
    shape: Sequence[int]
    dtype: torch.dtype
    device: torch.device
    timestep: Tensor | None
    conditioning: Mapping[str, Tensor]
    residuals: Mapping[int, Tensor] = field(default_factory=dict)
    values: Mapping[str, Value] = field(default_factory=dict)
    processed: bool = False
    next_forward: PatchForward | None = None
    sigmas: tuple[Tensor, Tensor] | None = None
    branches: tuple[int, ...] = ()


@dataclass(frozen=True)
class Region:
    """The part of a latent in the range `span` of dimension `dim`."""

    dim: int
    span: slice

    def of(self, latent: Tensor) -> Tensor:
        """Return the region of a tensor as a view. A dimension of size 1, as in a mask, stays as it is."""
        if latent.shape[self.dim] == 1:
            return latent
        return latent.narrow(self.dim, self.span.start, self.span.stop - self.span.start)
