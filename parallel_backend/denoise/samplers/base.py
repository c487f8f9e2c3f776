"""What every sampler shares: the coroutine's vocabulary and the rectified-flow noise process.

A sampler is a generator function

    def name(x, sigmas, flow, noise, *, option=default, ...) -> Steps

- `x`: the noisy latent at `sigmas[0]`, fp32 `[batch, channels, ...]`; the whole latent or one patch of it.
- `sigmas`: the schedule, 1-D fp32 **on the CPU** whatever the latent's device, so that a coefficient is
  never waited for and rounds the same way everywhere. `len(sigmas) - 1` steps; the last need not be zero.
- `flow`: the noise process; `noise`: where random numbers come from. Samplers that need neither ignore them.

It yields a `ModelCall` for every evaluation of the model, is sent `denoised` (the predicted clean latent,
fp32, shaped like `x`) and returns the final latent. Updates are element-wise in `x` and `denoised`: run on
patches, the same coroutine gives the patches of the whole latent's result. Tensors that were yielded or
sent are never written to.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor


class ModelCall(NamedTuple):
    """One evaluation of the model that a sampler asks for."""

    x: Tensor
    """Noisy latent, fp32 `[batch, channels, ...]`."""
    sigma: Tensor
    """Noise level of `x`, 0-dim fp32 on the CPU; one for the whole batch."""
    step: int | None
    """Index of the step this call opens; None for a further call of the same step."""


Steps = Generator[ModelCall, Tensor, Tensor]
"""A running sampler: yields calls, is sent `denoised`, returns the final latent."""


@dataclass(frozen=True)
class Flow:
    """Rectified flow (arXiv 2209.03003; ComfyUI's CONST).

    `x = sigma * noise_scale * noise + (1 - sigma) * clean`. `first_sigma` stands in for a first sigma of 1,
    where the logarithm of the signal-to-noise ratio is infinite: ComfyUI's
    `model_sampling.percent_to_sigma(1e-4)`, which depends on the model's shift.
    """

    first_sigma: float
    noise_scale: float = 1.0

    def half_log_snr(self, sigma: Tensor) -> Tensor:
        """`log((1 - sigma) / sigma)`: the time in which exponential integrators step."""
        return torch.logit(sigma).neg()

    def sigma_at(self, half_log_snr: Tensor) -> Tensor:
        """The inverse of `half_log_snr`."""
        return torch.sigmoid(-half_log_snr)

    def add_noise(self, sigma: Tensor, noise: Tensor, clean: Tensor) -> Tensor:
        """`clean`, noised to the level `sigma` with standard normal `noise`; all shapes broadcast."""
        return sigma * (self.noise_scale * noise) + (1.0 - sigma) * clean

    def clip_first(self, sigmas: Tensor) -> Tensor:
        """`sigmas`, with a first one of 1 or more replaced by `first_sigma`."""
        if len(sigmas) <= 1 or sigmas[0] < 1:
            return sigmas
        return torch.cat([sigmas.new_tensor([self.first_sigma]), sigmas[1:]])


def intervals(sigmas: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
    """`(step, sigma, sigma_next)` for every step of a schedule; the sigmas are 0-dim."""
    for step, (sigma, sigma_next) in enumerate(pairwise(sigmas.unbind())):
        yield step, sigma, sigma_next


def slope(x: Tensor, sigma: Tensor, denoised: Tensor) -> Tensor:
    """dx/dsigma of the probability-flow ODE at `x` (arXiv 2206.00364)."""
    return (x - denoised) / sigma
