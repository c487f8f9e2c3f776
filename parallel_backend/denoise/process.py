"""Noise processes: how a latent and noise make the model's input, and what the model's output says of the latent.

Samplers see `sigma` and a latent in ComfyUI's scaling and leave the rest to the process.
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
        """The model's own time at `sigma`, 0-dim fp32."""

    def model_input(self, x: Tensor, sigma: Tensor) -> Tensor:
        """What the model sees of the noisy latent `x`."""

    def denoised(self, x: Tensor, sigma: Tensor, output: Tensor) -> Tensor:
        """The clean latent that the model's `output` for `x` says."""

    def add_noise(self, sigma: Tensor, noise: Tensor, clean: Tensor) -> Tensor:
        """`clean`, noised to the level `sigma` with standard normal `noise`; all shapes broadcast."""


@dataclass(frozen=True)
class Flow:
    """Rectified flow (arXiv 2209.03003; ComfyUI's CONST); the model predicts noise minus latent.

    `x = sigma * noise_scale * noise + (1 - sigma) * clean`. `timestep_scale` turns sigma into the model's time.
    """

    noise_scale: float = 1.0
    timestep_scale: float = 1.0

    def timestep(self, sigma: Tensor) -> Tensor:
        """The model's timestep, proportional to sigma."""
        return sigma * self.timestep_scale

    def model_input(self, x: Tensor, _sigma: Tensor) -> Tensor:
        """The model sees the latent as it is."""
        return x

    def denoised(self, x: Tensor, sigma: Tensor, output: Tensor) -> Tensor:
        """Go back along the predicted velocity."""
        return x - output * sigma

    def add_noise(self, sigma: Tensor, noise: Tensor, clean: Tensor) -> Tensor:
        """Interpolate between latent and noise."""
        return sigma * (self.noise_scale * noise) + (1.0 - sigma) * clean


@dataclass(frozen=True)
class Diffusion:
    """Diffusion over a table of noise levels (ComfyUI's EPS and V_PREDICTION): `x = clean + sigma * noise`.

    The model was trained on `x / sqrt(sigma² + 1)`; it predicts the noise, or with `velocity` what arXiv 2202.00512 calls
    v. Its time is the number of the nearest noise level in `log_sigmas` (1-D fp32 on the CPU).
    """

    velocity: bool
    log_sigmas: Tensor

    def timestep(self, sigma: Tensor) -> Tensor:
        """The nearest level's number."""
        return (sigma.log() - self.log_sigmas).abs().argmin().float()

    def model_input(self, x: Tensor, sigma: Tensor) -> Tensor:
        """Scaled to unit variance."""
        return x / (sigma**2 + 1) ** 0.5

    def denoised(self, x: Tensor, sigma: Tensor, output: Tensor) -> Tensor:
        """From the predicted noise or velocity."""
        if self.velocity:
            return x / (sigma**2 + 1) - output * (sigma / (sigma**2 + 1) ** 0.5)
        return x - output * sigma

    def add_noise(self, sigma: Tensor, noise: Tensor, clean: Tensor) -> Tensor:
        """The clean latent with noise of a level."""
        return sigma * noise + clean


def process_of(settings: Sampling, tensors: Mapping[str, Tensor]) -> NoiseProcess:
    """The process that a request's settings and tensors describe."""
    if isinstance(settings, FlowSettings):
        return Flow(settings.noise_scale, settings.timestep_scale)
    return Diffusion(settings.prediction == "v", tensors["log_sigmas"].cpu())
