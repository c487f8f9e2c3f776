"""What every sampler shares: the coroutine's vocabulary.

A sampler is a generator function

    def name(x, sigmas, process, noise, *, option=default, ...) -> Steps

- `x`: the noisy latent at `sigmas[0]`, fp32 `[batch, channels, ...]`; the whole latent or one patch of it.
- `sigmas`: the schedule, 1-D fp32 **on the CPU** whatever the latent's device, so that a coefficient is
  never waited for and rounds the same way everywhere. `len(sigmas) - 1` steps; the last need not be zero.
- `process`: the noise process (see `process`); `noise`: where random numbers come from. Samplers that need neither ignore them.

It yields a `ModelCall` for every evaluation of the model, is sent `denoised` (the predicted clean latent,
fp32, shaped like `x`) and returns the final latent. Updates are element-wise in `x` and `denoised`: run on
patches, the same coroutine gives the patches of the whole latent's result. Tensors that were yielded or
sent are never written to. Noise is drawn only after a call was answered, by all samplers of a latent in the same order.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from itertools import pairwise
from typing import NamedTuple

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


def intervals(sigmas: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
    """`(step, sigma, sigma_next)` for every step of a schedule; the sigmas are 0-dim."""
    for step, (sigma, sigma_next) in enumerate(pairwise(sigmas.unbind())):
        yield step, sigma, sigma_next


def slope(x: Tensor, sigma: Tensor, denoised: Tensor) -> Tensor:
    """dx/dsigma of the probability-flow ODE at `x` (arXiv 2206.00364)."""
    return (x - denoised) / sigma
