"""What every stage is told of a forward."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..diffusion import Value


@dataclass(frozen=True)
class Inputs:
    """All but the latent.

    `key` tells forwards apart whose caches are kept; `shape` is the latent's `[batch, channels, ...]`; `timestep` is
    `[batch]` in fp32 and the conditioning in the compute dtype. `residuals` are added to this rank's image tokens after
    blocks of this stage. `values` are what the conditioning holds besides tensors; `processed` says that ComfyUI's model
    class has made of the timestep what it makes of it.
    """

    key: Hashable
    shape: Sequence[int]
    dtype: torch.dtype
    device: torch.device
    timestep: Tensor
    conditioning: Mapping[str, Tensor]
    residuals: Mapping[int, Tensor] = field(default_factory=dict)
    values: Mapping[str, Value] = field(default_factory=dict)
    processed: bool = False
