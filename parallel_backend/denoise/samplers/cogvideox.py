"""CogVideoX's own samplers, equal to diffusers' CogVideoXDDIMScheduler and CogVideoXDPMScheduler step by step.

They step in the variance-preserving latent `y = x / sqrt(sigma² + 1) = alpha * clean + spread * noise`. The schedule begins
at pure noise (zero terminal SNR, arXiv 2305.08891), for which ComfyUI's tables hold a large finite sigma: what that lets
through of the latent is taken out again, so that the first step is exact.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .base import ModelCall, Steps, intervals
from .noise import LatentNoise
from .process import Process

PURE_NOISE = 4000.0
"""Sigmas from here on mean infinity; ComfyUI's tables end at 4518 where the terminal SNR is zero and far below elsewhere."""


class _Level(NamedTuple):
    """A noise level, 0-dim fp64."""

    alpha: Tensor
    spread: Tensor
    half_log_snr: Tensor


def _level(sigma: Tensor) -> _Level:
    sigma = sigma.double()
    if sigma >= PURE_NOISE:
        sigma = torch.full_like(sigma, torch.inf)
    norm = (sigma**2 + 1) ** 0.5
    return _Level(1 / norm, torch.where(sigma.isinf(), 1.0, sigma / norm), -sigma.log())


def _norm(sigma: Tensor) -> Tensor:
    return (sigma.double() ** 2 + 1) ** 0.5


def _clean(y: Tensor, sigma: Tensor, denoised: Tensor) -> Tensor:
    """The predicted clean latent; from pure noise, without the part of `y` that a finite sigma lets through."""
    if sigma < PURE_NOISE:
        return denoised
    norm = _norm(sigma)
    return (denoised - y / norm) / (sigma.double() / norm)


def cogvideox_ddim(x: Tensor, sigmas: Tensor, _process: Process, _noise: LatentNoise) -> Steps:
    """DDIM (arXiv 2010.02502) as CogVideoX's code writes it."""
    y = x / _norm(sigmas[0])
    for step, sigma, sigma_next in intervals(sigmas):
        denoised = yield ModelCall((y * _norm(sigma)).float(), sigma, step)
        here, then = _level(sigma), _level(sigma_next)
        kept = then.spread / here.spread
        y = kept * y + (then.alpha - here.alpha * kept) * _clean(y, sigma, denoised)
    return (y * _norm(sigmas[-1])).float()


def cogvideox_dpm(x: Tensor, sigmas: Tensor, _process: Process, noise: LatentNoise) -> Steps:
    """SDE-DPM-Solver++(2M) (arXiv 2211.01095) as CogVideoX's code writes it, with fresh noise in every step but the last."""
    draw = noise.gaussian()
    y = x / _norm(sigmas[0])
    before: tuple[Tensor, Tensor] | None = None
    for step, sigma, sigma_next in intervals(sigmas):
        denoised = yield ModelCall((y * _norm(sigma)).float(), sigma, step)
        here, then = _level(sigma), _level(sigma_next)
        clean = _clean(y, sigma, denoised)
        h = then.half_log_snr - here.half_log_snr
        prediction = clean
        if before is not None and sigma_next > 0:
            clean_before, h_before = before
            share = h / (2 * h_before)
            prediction = (1 + share) * clean - share * clean_before
        y = then.spread / here.spread * (-h).exp() * y - (-2 * h).expm1() * then.alpha * prediction
        if sigma_next > 0:
            y = y + then.spread * (1 - (-2 * h).exp()) ** 0.5 * draw(sigma, sigma_next)
        before = clean, h
    return (y * _norm(sigmas[-1])).float()
