"""Deterministic samplers that remember nothing from one step to the next."""

from __future__ import annotations

from torch import Tensor

from .base import ModelCall, Steps, intervals, slope
from .noise import LatentNoise
from .process import Process


def euler(x: Tensor, sigmas: Tensor, _process: Process, _noise: LatentNoise) -> Steps:
    """Euler's method (arXiv 2206.00364, algorithm 1 without its correction)."""
    for step, sigma, sigma_next in intervals(sigmas):
        denoised = yield ModelCall(x, sigma, step)
        x = x + slope(x, sigma, denoised) * (sigma_next - sigma)
    return x


def heun(x: Tensor, sigmas: Tensor, _process: Process, _noise: LatentNoise) -> Steps:
    """Heun's method (arXiv 2206.00364, algorithm 1): averages the slopes at both ends; two calls a step."""
    for step, sigma, sigma_next in intervals(sigmas):
        denoised = yield ModelCall(x, sigma, step)
        here, width = slope(x, sigma, denoised), sigma_next - sigma
        ahead = x + here * width
        if sigma_next == 0:
            x = ahead
        else:
            denoised = yield ModelCall(ahead, sigma_next, None)
            x = x + (here + slope(ahead, sigma_next, denoised)) / 2 * width
    return x


def dpm_2(x: Tensor, sigmas: Tensor, _process: Process, _noise: LatentNoise) -> Steps:
    """DPM-Solver-2 (arXiv 2206.00927, algorithm 1): the slope at the geometric midpoint; two calls a step."""
    for step, sigma, sigma_next in intervals(sigmas):
        denoised = yield ModelCall(x, sigma, step)
        here = slope(x, sigma, denoised)
        if sigma_next == 0:
            x = x + here * (sigma_next - sigma)
        else:
            middle = sigma.log().lerp(sigma_next.log(), 0.5).exp()
            halfway = x + here * (middle - sigma)
            denoised = yield ModelCall(halfway, middle, None)
            x = x + slope(halfway, middle, denoised) * (sigma_next - sigma)
    return x
