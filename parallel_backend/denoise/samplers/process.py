"""Noise processes: how a latent and noise make the model's input, and what the model's output says of the latent.

Samplers see `sigma` and a latent in ComfyUI's scaling and leave the rest to the process.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ...diffusion import FlowSettings, Sampling
from .renoise import Split, split_exploding, split_flow


class Process(Protocol):
    """A noise process; sigmas are 0-dim fp32 on the CPU, latents fp32 `[batch, channels, ...]`."""

    @property
    def noise_scale(self) -> float:
        """What fresh noise is multiplied by."""

    def timestep(self, sigma: Tensor) -> Tensor:
        """The model's own time at `sigma`, 0-dim fp32."""

    def model_input(self, x: Tensor, sigma: Tensor) -> Tensor:
        """What the model sees of the noisy latent `x`."""

    def denoised(self, x: Tensor, sigma: Tensor, output: Tensor) -> Tensor:
        """The clean latent that the model's `output` for `x` says."""

    def add_noise(self, sigma: Tensor, noise: Tensor, clean: Tensor) -> Tensor:
        """`clean`, noised to the level `sigma` with standard normal `noise`; all shapes broadcast."""

    def half_log_snr(self, sigma: Tensor) -> Tensor:
        """Half the logarithm of the signal-to-noise ratio: the time in which exponential integrators step."""

    def sigma_at(self, half_log_snr: Tensor) -> Tensor:
        """The inverse of `half_log_snr`."""

    def halfway(self, sigma: Tensor, sigma_next: Tensor) -> Tensor:
        """The sigma between two in the middle of their half-log-SNRs."""

    def clip_first(self, sigmas: Tensor) -> Tensor:
        """`sigmas`, with a finite half-log-SNR at the first one."""

    def descend(self, x: Tensor, sigma: Tensor, sigma_next: Tensor, denoised: Tensor) -> Tensor:
        """An Euler step, in the form in which ComfyUI's ancestral sampler rounds it."""

    def split(self, sigma: Tensor, sigma_next: Tensor, eta: float) -> Split:
        """How an ancestral step divides; `eta` 0 adds no noise."""


@dataclass(frozen=True)
class Flow:
    """Rectified flow (arXiv 2209.03003; ComfyUI's CONST); the model predicts noise minus latent.

    `x = sigma * noise_scale * noise + (1 - sigma) * clean`. `first_sigma` stands in for a first sigma of 1,
    where the logarithm of the signal-to-noise ratio is infinite: ComfyUI's
    `model_sampling.percent_to_sigma(1e-4)`, which depends on the model's shift. `timestep_scale` turns sigma into the
    model's time.
    """

    first_sigma: float
    noise_scale: float = 1.0
    timestep_scale: float = 1.0

    def timestep(self, sigma: Tensor) -> Tensor:
        """Proportional to sigma."""
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

    def half_log_snr(self, sigma: Tensor) -> Tensor:
        """`log((1 - sigma) / sigma)`."""
        return torch.logit(sigma).neg()

    def sigma_at(self, half_log_snr: Tensor) -> Tensor:
        """The inverse of `half_log_snr`."""
        return torch.sigmoid(-half_log_snr)

    def halfway(self, sigma: Tensor, sigma_next: Tensor) -> Tensor:
        """From pure noise, where there is no halfway, 0.9999 as in ComfyUI; counted as there, which rounds by 1e-6 near 0."""
        if sigma == 1:
            return torch.full_like(sigma, 0.9999)
        start, end = (((1 - each) / each).log() for each in (sigma, sigma_next))
        return 1 / ((start + (end - start) / 2).exp() + 1)

    def clip_first(self, sigmas: Tensor) -> Tensor:
        """`sigmas`, with a first one of 1 or more replaced by `first_sigma`."""
        if len(sigmas) <= 1 or sigmas[0] < 1:
            return sigmas
        return torch.cat([sigmas.new_tensor([self.first_sigma]), sigmas[1:]])

    def descend(self, x: Tensor, sigma: Tensor, sigma_next: Tensor, denoised: Tensor) -> Tensor:
        """Interpolate between latent and prediction."""
        kept = sigma_next / sigma
        return kept * x + (1 - kept) * denoised

    def split(self, sigma: Tensor, sigma_next: Tensor, eta: float) -> Split:
        """See `split_flow`."""
        return split_flow(sigma, sigma_next, eta)


@dataclass(frozen=True)
class Diffusion:
    """Diffusion over a table of noise levels (ComfyUI's EPS and V_PREDICTION): `x = clean + sigma * noise`.

    The model was trained on `x / sqrt(sigma² + 1)`; it predicts the noise, or with `velocity` what arXiv 2202.00512 calls
    v. Its time is the number of the nearest noise level in `log_sigmas` (1-D fp32 on the CPU).
    """

    velocity: bool
    log_sigmas: Tensor
    noise_scale: float = 1.0

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
        """Add it."""
        return sigma * noise + clean

    def half_log_snr(self, sigma: Tensor) -> Tensor:
        """`-log(sigma)`."""
        return sigma.log().neg()

    def sigma_at(self, half_log_snr: Tensor) -> Tensor:
        """The inverse of `half_log_snr`."""
        return half_log_snr.neg().exp()

    def halfway(self, sigma: Tensor, sigma_next: Tensor) -> Tensor:
        """The geometric mean."""
        return self.sigma_at(self.half_log_snr(sigma).lerp(self.half_log_snr(sigma_next), 0.5))

    def clip_first(self, sigmas: Tensor) -> Tensor:
        """The first sigma is finite already."""
        return sigmas

    def descend(self, x: Tensor, sigma: Tensor, sigma_next: Tensor, denoised: Tensor) -> Tensor:
        """Along the slope."""
        return x + (x - denoised) / sigma * (sigma_next - sigma)

    def split(self, sigma: Tensor, sigma_next: Tensor, eta: float) -> Split:
        """See `split_exploding`."""
        sigma_down, amount = split_exploding(sigma, sigma_next, eta)
        return Split(sigma_down, torch.ones_like(sigma), amount)


def process_of(settings: Sampling, tensors: Mapping[str, Tensor]) -> Process:
    """The process that a request's settings and tensors describe."""
    if isinstance(settings, FlowSettings):
        return Flow(settings.first_sigma, settings.noise_scale, settings.timestep_scale)
    return Diffusion(settings.prediction == "v", tensors["log_sigmas"].cpu())
