"""Inpainting: outside the mask the latent follows the original, as ComfyUI's KSamplerX0Inpaint does it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from .samplers import Flow

Denoise = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Inpaint:
    """Wraps a denoiser so that only the masked part changes.

    `mask` is 1 where the latent may change, `latent` the clean original, `noise` what it was noised with; all
    broadcast to the latent's `[batch, channels, ...]`.
    """

    denoise: Denoise
    flow: Flow
    mask: Tensor
    latent: Tensor
    noise: Tensor

    def __call__(self, x: Tensor, sigma: Tensor) -> Tensor:
        """The denoised latent."""
        keep = 1.0 - self.mask
        x = x * self.mask + self.flow.add_noise(sigma, self.noise, self.latent) * keep
        return self.denoise(x, sigma) * self.mask + self.latent * keep
