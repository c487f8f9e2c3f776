"""Deterministic samplers that reuse the predictions of earlier steps, and res_multistep's ancestral form."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from .base import ModelCall, Steps, intervals, slope
from .deis_coefficients import ORDER as DEIS_ORDER
from .deis_coefficients import deis_weights
from .noise import LatentNoise
from .process import Process
from .renoise import split_exploding

_ADAMS_BASHFORTH = (
    (1.0,),
    (3 / 2, -1 / 2),
    (23 / 12, -16 / 12, 5 / 12),
    (55 / 24, -59 / 24, 37 / 24, -9 / 24),
)
"""Weights of the newest slope, the one before it, ... for orders 1 to 4 on a uniform grid."""


def dpmpp_2m(x: Tensor, sigmas: Tensor, _process: Process, _noise: LatentNoise) -> Steps:
    """DPM-Solver++(2M) (arXiv 2211.01095, algorithm 2), in the time -log(sigma)."""
    before: tuple[Tensor, Tensor] | None = None
    for step, sigma, sigma_next in intervals(sigmas):
        denoised = yield ModelCall(x, sigma, step)
        time, time_next = -sigma.log(), -sigma_next.log()
        h = time_next - time
        prediction = denoised
        if before is not None and sigma_next > 0:
            denoised_before, time_before = before
            share = 1 / (2 * ((time - time_before) / h))
            prediction = (1 + share) * denoised - share * denoised_before
        x = time_next.neg().exp() / time.neg().exp() * x - (-h).expm1() * prediction
        before = denoised, time
    return x


def ipndm(x: Tensor, sigmas: Tensor, _process: Process, _noise: LatentNoise) -> Steps:
    """iPNDM (arXiv 2204.13902; after PNDM, arXiv 2202.09778): Adams-Bashforth up to order 4."""
    slopes: deque[Tensor] = deque(maxlen=len(_ADAMS_BASHFORTH))
    for step, sigma, sigma_next in intervals(sigmas):
        denoised = yield ModelCall(x, sigma, step)
        slopes.appendleft(slope(x, sigma, denoised))
        if sigma_next == 0:
            x = denoised
        else:
            width = sigma_next - sigma
            x = _advance(x, [width * weight for weight in _ADAMS_BASHFORTH[len(slopes) - 1]], slopes)
    return x


def deis(x: Tensor, sigmas: Tensor, _process: Process, _noise: LatentNoise) -> Steps:
    """DEIS, tAB3 (arXiv 2204.13902): exponential Adams-Bashforth with weights made for this schedule."""
    slopes: deque[Tensor] = deque(maxlen=DEIS_ORDER)
    weights = deis_weights(sigmas)
    for step, sigma, _sigma_next in intervals(sigmas):
        denoised = yield ModelCall(x, sigma, step)
        slopes.appendleft(slope(x, sigma, denoised))
        x = _advance(x, weights[step], slopes)
    return x


def _advance(x: Tensor, weights: Sequence[Tensor], slopes: Iterable[Tensor]) -> Tensor:
    # Where a step uses fewer slopes than there are, it uses the newest.
    for weight, past in zip(weights, slopes, strict=False):
        x = x + weight * past
    return x


def res_multistep(x: Tensor, sigmas: Tensor, process: Process, noise: LatentNoise, *, eta: float = 0.0) -> Steps:
    """Refined exponential solver, second-order multistep (arXiv 2308.02157), in the time -log(sigma).

    `eta` 0 is deterministic; 1 makes every step ancestral (`split_exploding`).
    """
    draw = noise.gaussian()
    before: tuple[Tensor, Tensor, Tensor] | None = None
    for step, sigma, sigma_next in intervals(sigmas):
        denoised = yield ModelCall(x, sigma, step)
        sigma_down, amount = split_exploding(sigma, sigma_next, eta)
        if before is None or sigma_down == 0:
            x = x + slope(x, sigma, denoised) * (sigma_down - sigma)
        else:
            denoised_before, sigma_before, down_before = before
            time = -sigma.log()
            h = -sigma_down.log() - time
            # Where the previous prediction lies, as a share of this step; negative, it is behind.
            behind = (down_before.log() - sigma_before.log()) / h
            phi_1 = torch.expm1(-h) / -h
            phi_2 = (phi_1 - 1) / -h
            weight_before = torch.nan_to_num(phi_2 / behind, nan=0.0)
            weight = torch.nan_to_num(phi_1 - phi_2 / behind, nan=0.0)
            x = (-h).exp() * x + h * (weight * denoised + weight_before * denoised_before)
        if eta and sigma_next > 0:
            x = x + draw(sigma, sigma_next) * process.noise_scale * amount
        before = denoised, sigma, sigma_down
    return x


def gradient_estimation(x: Tensor, sigmas: Tensor, _process: Process, _noise: LatentNoise) -> Steps:
    """Gradient estimation (arXiv 2306.04848), gamma = 2: Euler with slopes extrapolated by one step."""
    before: Tensor | None = None
    for step, sigma, sigma_next in intervals(sigmas):
        denoised = yield ModelCall(x, sigma, step)
        here, width = slope(x, sigma, denoised), sigma_next - sigma
        if sigma_next == 0:
            x = denoised
        elif before is None:
            x = x + here * width
        else:
            x = x + here * width + (here - before) * width
        before = here
    return x
