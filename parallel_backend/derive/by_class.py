"""Calls and conditioning as ComfyUI's own class makes them of noise and a prompt."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..conditioning import NAMES, Conditioning, flatten
from ..models.comfyui.own_call import conditioning_of, own_call
from .calls import ModelCall, Sizes

STRENGTH = 0.6
"""The noise level of a call, as a fraction of the model's highest sigma."""


class ByClass:
    """Makes calls of one model.

    Args:
        base: ComfyUI's BaseModel, in memory.
    """

    def __init__(self, base: Any) -> None:
        self._base = base
        self._channels = base.latent_format.latent_channels

    def conditioning(self, sizes: Sizes, prompt: Mapping[str, Any]) -> Conditioning:
        """Return the conditioning that the class's `extra_conds` makes of a prompt, for one row."""
        conditioning = Conditioning({})
        for name, entry in conditioning_of(self._base, [self.latent(sizes)], prompt).items():
            flatten(NAMES.get(name, name), entry.cond, conditioning.tensors, conditioning.values)
        return conditioning

    def latent(self, sizes: Sizes) -> Tensor:
        """Return noise `[rows, channels, (frames,) height, width]`."""
        generator = torch.Generator().manual_seed(1)
        return torch.randn(sizes.rows, self._channels, *sizes.picture, generator=generator)

    def call(self, sizes: Sizes, prompt: Mapping[str, Any]) -> ModelCall:
        """Return the arguments of one forward call.

        Raises:
            TypeError: the model takes several latents.
        """
        sigma = float(self._base.model_sampling.sigma_max) * STRENGTH
        class_call = own_call(self._base, [self.latent(sizes)], prompt, sigma)
        if not isinstance(class_call.latent, Tensor):
            raise TypeError("its latent is several ones packed together")
        return ModelCall(class_call.latent, class_call.timestep, class_call.arguments, class_call.options)
