"""Noise processes: the conversions from a noisy latent to the model's input, and from its output to the denoised latent.

Samplers know only `sigma` and a latent in ComfyUI's scaling.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from ..diffusion import FlowSettings, Sampling


class NoiseProcess(Protocol):
    """A noise process; sigmas are 0-dim fp32 on the CPU, latents fp32 `[batch, channels, ...]`."""

    def timestep(self, sigma: Tensor) -> Tensor:
        """Return the model's timestep at `sigma`, 0-dim fp32."""

    def model_input(self, x: Tensor, sigma: Tensor) -> Tensor:
        """Return the model's input for the noisy latent `x`."""

    def denoised(self, x: Tensor, sigma: Tensor, output: Tensor) -> Tensor:
        """Return the denoised latent that follows from the model's `output` for the noisy latent `x`."""

    def add_noise(self, sigma: Tensor, noise: Tensor, clean: Tensor) -> Tensor:
        """Return the latent `clean` with standard normal `noise` at the level `sigma`; all shapes broadcast."""


@dataclass(frozen=True)
class Flow:
    """Rectified flow (arXiv 2209.03003; ComfyUI's CONST). The model predicts noise minus latent.

    The noisy latent is `x = sigma * noise_scale * noise + (1 - sigma) * clean`. The model's timestep is
    `timestep_scale * sigma`.
    """

    noise_scale: float = 1.0
    timestep_scale: float = 1.0

    def timestep(self, sigma: Tensor) -> Tensor:
        """Return the model's timestep, proportional to sigma."""
        return sigma * self.timestep_scale

    def model_input(self, x: Tensor, _sigma: Tensor) -> Tensor:
        """Return the latent unchanged."""
        return x

    def denoised(self, x: Tensor, sigma: Tensor, output: Tensor) -> Tensor:
        """Return the latent that follows the predicted velocity back to sigma 0."""
        return x - output * sigma

    def add_noise(self, sigma: Tensor, noise: Tensor, clean: Tensor) -> Tensor:
        """Interpolate between latent and noise."""
        return sigma * (self.noise_scale * noise) + (1.0 - sigma) * clean


@dataclass(frozen=True)
class Diffusion:
    """Diffusion over a table of noise levels (ComfyUI's EPS and V_PREDICTION): `x = clean + sigma * noise`.

    The model was trained on `x / sqrt(sigma² + 1)`. It predicts the noise, or with `velocity` the quantity v of
    arXiv 2202.00512. Its timestep is the number of the nearest noise level in `log_sigmas` (1-D fp32 on the CPU).
    """

    velocity: bool
    log_sigmas: Tensor

    def timestep(self, sigma: Tensor) -> Tensor:
        """Return the number of the nearest noise level."""
        return (sigma.log() - self.log_sigmas).abs().argmin().float()

    def model_input(self, x: Tensor, sigma: Tensor) -> Tensor:
        """Return the latent scaled to unit variance."""
        return x / (sigma**2 + 1) ** 0.5

    def denoised(self, x: Tensor, sigma: Tensor, output: Tensor) -> Tensor:
        """Return the denoised latent from the predicted noise or velocity."""
        if self.velocity:
            return x / (sigma**2 + 1) - output * (sigma / (sigma**2 + 1) ** 0.5)
        return x - output * sigma

    def add_noise(self, sigma: Tensor, noise: Tensor, clean: Tensor) -> Tensor:
        """Add noise to the clean latent."""
        return sigma * noise + clean


def process_of(settings: Sampling, tensors: Mapping[str, Tensor]) -> NoiseProcess:
    """Return the noise process that a request's settings and tensors describe."""
    if isinstance(settings, FlowSettings):
        return Flow(settings.noise_scale, settings.timestep_scale)
    return Diffusion(settings.prediction == "v", tensors["log_sigmas"].cpu())
