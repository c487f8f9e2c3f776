"""Samplers that remember nothing between steps and add fresh Gaussian noise in each."""

from __future__ import annotations

import torch
from torch import Tensor

from .base import ModelCall, Steps, intervals, slope
from .noise import LatentNoise
from .process import Process


def euler_ancestral(
    x: Tensor, sigmas: Tensor, process: Process, noise: LatentNoise, *, eta: float = 1.0, s_noise: float = 1.0
) -> Steps:
    """Ancestral Euler steps (k-diffusion): see the process's `split`.

    `eta` is how much of the noise is exchanged in a step, `s_noise` multiplies the fresh noise.
    """
    draw = noise.gaussian()
    for step, sigma, sigma_next in intervals(sigmas):
        denoised = yield ModelCall(x, sigma, step)
        split = process.split(sigma, sigma_next, eta)
        if split.sigma_down == 0:
            x = denoised
            continue
        x = process.descend(x, sigma, split.sigma_down, denoised)
        if eta > 0:
            x = split.signal * x + draw(sigma, sigma_next) * (s_noise * process.noise_scale) * split.amount
    return x


def dpm_2_ancestral(x: Tensor, sigmas: Tensor, process: Process, noise: LatentNoise) -> Steps:
    """DPM-Solver-2 steps (arXiv 2206.00927) to the level of the process's `split`, then fresh noise; two calls a step."""
    draw = noise.gaussian()
    for step, sigma, sigma_next in intervals(sigmas):
        denoised = yield ModelCall(x, sigma, step)
        here = slope(x, sigma, denoised)
        split = process.split(sigma, sigma_next, 1.0)
        if split.sigma_down == 0:
            x = x + here * (split.sigma_down - sigma)
            continue
        middle = sigma.log().lerp(split.sigma_down.log(), 0.5).exp()
        halfway = x + here * (middle - sigma)
        denoised = yield ModelCall(halfway, middle, None)
        x = x + slope(halfway, middle, denoised) * (split.sigma_down - sigma)
        x = split.signal * x + draw(sigma, sigma_next) * process.noise_scale * split.amount
    return x


def dpmpp_2s_ancestral(
    x: Tensor, sigmas: Tensor, process: Process, noise: LatentNoise, *, eta: float = 1.0, s_noise: float = 1.0
) -> Steps:
    """DPM-Solver++(2S) steps (arXiv 2211.01095) to the level of the process's `split`, then fresh noise; two calls a step.

    The second call is halfway in log-SNR.
    """
    draw = noise.gaussian()
    for step, sigma, sigma_next in intervals(sigmas):
        denoised = yield ModelCall(x, sigma, step)
        split = process.split(sigma, sigma_next, eta)
        if split.sigma_down == 0:
            x = x + slope(x, sigma, denoised) * (split.sigma_down - sigma)
        else:
            middle = process.halfway(sigma, split.sigma_down)
            kept = middle / sigma
            halfway = kept * x + (1 - kept) * denoised
            denoised = yield ModelCall(halfway, middle, None)
            kept = split.sigma_down / sigma
            x = kept * x + (1 - kept) * denoised
        if eta > 0 and sigma_next > 0:
            x = split.signal * x + draw(sigma, sigma_next) * (s_noise * process.noise_scale) * split.amount
    return x


def ddpm(x: Tensor, sigmas: Tensor, _process: Process, noise: LatentNoise) -> Steps:
    """DDPM's posterior steps (arXiv 2006.11239, eq. 7), with sigma as in `x = clean + sigma * noise`."""
    draw = noise.gaussian()
    for step, sigma, sigma_next in intervals(sigmas):
        denoised = yield ModelCall(x, sigma, step)
        cumulated, cumulated_next = 1 / (sigma * sigma + 1), 1 / (sigma_next * sigma_next + 1)
        alpha = cumulated / cumulated_next
        preserving = x / torch.sqrt(1 + sigma**2)
        predicted = slope(x, sigma, denoised)
        x = (1 / alpha).sqrt() * (preserving - (1 - alpha) * predicted / (1 - cumulated).sqrt())
        if sigma_next > 0:
            amount = ((1 - alpha) * (1 - cumulated_next) / (1 - cumulated)).sqrt()
            x = x + amount * draw(sigma, sigma_next)
        if sigma_next != 0:
            x = x * torch.sqrt(1 + sigma_next**2)
    return x


def lcm(
    x: Tensor,
    sigmas: Tensor,
    process: Process,
    noise: LatentNoise,
    *,
    s_noise: float = 1.0,
    s_noise_end: float | None = None,
    noise_clip_std: float = 0.0,
) -> Steps:
    """Multistep consistency sampling (arXiv 2310.04378): each step predicts the clean latent and noises it.

    The noise is multiplied by a factor that goes linearly from `s_noise` at the first step to `s_noise_end`
    (None: the same) at the last, and clamped to `noise_clip_std` of its standard deviations if that is
    positive.
    """
    draw = noise.gaussian(clip_std=noise_clip_std)
    end = s_noise if s_noise_end is None else s_noise_end
    last_step = len(sigmas) - 2
    for step, sigma, sigma_next in intervals(sigmas):
        x = yield ModelCall(x, sigma, step)
        if sigma_next > 0:
            factor = s_noise + (end - s_noise) * (step / max(last_step, 1))
            x = process.add_noise(sigma_next, draw(sigma, sigma_next) * factor, x)
    return x
