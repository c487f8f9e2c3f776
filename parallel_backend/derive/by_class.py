"""Calls, and conditioning, as ComfyUI's own class makes them of noise and a prompt."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..conditioning import NAMES, Conditioning, flatten
from .calls import ModelCall, Sizes


class _Called(Exception):
    """The model was called, with this."""


class ByClass:
    """Calls of one model.

    Args:
        base: ComfyUI's BaseModel, in memory.
    """

    def __init__(self, base: Any) -> None:
        self._base = base
        self._channels = base.latent_format.latent_channels

    def conditioning(self, sizes: Sizes, prompt: Mapping[str, Any]) -> Conditioning:
        """What the class makes of a prompt, before it is brought to a batch."""
        made = Conditioning({})
        for name, each in self._found(sizes, prompt).items():
            flatten(NAMES.get(name, name), each.cond, made.tensors, made.values)
        return made

    def latent(self, sizes: Sizes) -> Tensor:
        """Noise."""
        generator = torch.Generator().manual_seed(1)
        return torch.randn(sizes.rows, self._channels, *sizes.picture, generator=generator)

    def call(self, sizes: Sizes, prompt: Mapping[str, Any]) -> ModelCall:
        """What the model is called with."""
        latent = self.latent(sizes)
        conditioning = {
            name: each.process_cond(batch_size=sizes.rows, device=latent.device, area=None).cond
            for name, each in self._found(sizes, prompt).items()
        }
        time = self._base.model_sampling.sigma_max.reshape(1).expand(sizes.rows) * 0.6

        def called(module: Any, args: Any, kwargs: Any) -> None:
            raise _Called(args, kwargs)

        handle = self._base.diffusion_model.register_forward_pre_hook(called, with_kwargs=True)
        try:
            self._base.apply_model(latent, time, **conditioning)
        except _Called as call:
            (x, timestep), arguments = call.args
        finally:
            handle.remove()
        options = arguments.pop("transformer_options")
        if not isinstance(x, Tensor):
            raise TypeError("its latent is several ones packed together")
        return ModelCall(x, timestep, arguments, options)

    def _found(self, sizes: Sizes, prompt: Mapping[str, Any]) -> dict[str, Any]:
        latent = self.latent(sizes)
        height, width = (8 * size for size in sizes.picture[-2:])
        entries = {
            "width": width,
            "height": height,
            "prompt_type": "positive",
            "seed": 0,
            "denoise_mask": None,
            **prompt,
        }
        found: dict[str, Any] = self._base.extra_conds(
            noise=latent, latent_image=latent, device=latent.device, latent_shapes=[latent.shape], **entries
        )
        return found
