"""What every stage is told of a forward."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from ..diffusion import Value


class PatchForward(NamedTuple):
    """The forward of a patch, by the key of its inputs."""

    key: Hashable
    patch: int


@dataclass(frozen=True)
class Inputs:
    """All but the latent.

    Attributes:
        key: tells forwards apart whose prompts differ, and so what is kept of them.
        shape: the latent's, `[batch, channels, ...]`.
        dtype: the compute dtype.
        device: where the rank computes.
        timestep: `[batch]` in fp32; None where the conditioning has several.
        conditioning: tensors by the model's names, in the compute dtype.
        residuals: a ControlNet's output for this rank's tokens of the picture, by the block of this stage that it is added after.
        values: what the conditioning holds besides tensors.
        processed: whether ComfyUI's model class has made of the timestep what it makes of it.
        behind: the patch's forward that comes behind this one, if it is known to come.
        sigmas: those of the call (one is enough) and of all steps; 1-D in fp32.
        sides: of each prompt in the batch, 0 for the positive one; empty where nobody knows.
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
    """`span` along dimension `dim` of a latent."""

    dim: int
    span: slice

    def of(self, latent: Tensor) -> Tensor:
        """The part (a view); a dimension of size 1, as a mask may have, is left alone."""
        if latent.shape[self.dim] == 1:
            return latent
        return latent.narrow(self.dim, self.span.start, self.span.stop - self.span.start)
