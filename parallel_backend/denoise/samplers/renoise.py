"""How an ancestral step splits: down below the next noise level, then up to it with fresh noise."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Split(NamedTuple):
    """The parts of an ancestral step, all 0-dim."""

    sigma_down: Tensor
    """Where the deterministic part ends."""
    signal: Tensor
    """What its result is multiplied by, so that the clean part is that of `sigma_next` again."""
    amount: Tensor
    """Standard deviation of the fresh noise."""


def split_flow(sigma: Tensor, sigma_next: Tensor, eta: float) -> Split:
    """Split a step of `x = sigma * noise + (1 - sigma) * clean`.

    `eta` 0 stops at sigma_next and adds no noise; 1 goes down to sigma_next²/sigma.
    `amount` follows from the two variances: `sigma_next² = (signal * sigma_down)² + amount²`.
    """
    if sigma_next == 0:  # also from 0, where there is no ratio
        return Split(sigma_next, torch.ones_like(sigma), torch.zeros_like(sigma))
    sigma_down = sigma_next * (1 + (sigma_next / sigma - 1) * eta)
    clean_next, clean_down = 1 - sigma_next, 1 - sigma_down
    amount = (sigma_next**2 - sigma_down**2 * clean_next**2 / clean_down**2) ** 0.5
    return Split(sigma_down, clean_next / clean_down, amount)


def split_exploding(sigma: Tensor, sigma_next: Tensor, eta: float) -> tuple[Tensor, Tensor]:
    """Split a step of `x = clean + sigma * noise` into `(sigma_down, amount)`.

    Variances add: `sigma_next² = sigma_down² + amount²`.
    `eta` 1 gives the variance of DDPM's posterior (arXiv 2006.11239), 0 the deterministic step.
    """
    if not eta:
        return sigma_next, torch.zeros_like(sigma_next)
    posterior = (sigma_next**2 * (sigma**2 - sigma_next**2) / sigma**2) ** 0.5
    # where sigma does not fall there is no posterior (NaN), and all of the noise is exchanged, as in ComfyUI
    amount = eta * posterior if eta * posterior < sigma_next else sigma_next
    return (sigma_next**2 - amount**2) ** 0.5, amount
