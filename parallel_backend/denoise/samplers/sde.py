"""Stochastic exponential integrators in half-log-SNR time, where the model's part of the equation is linear.

Common to all: the first sigma is one of finite log-SNR (`clip_first`); a step that ends at zero returns
`denoised`; `eta` is the strength of the stochastic part (0: the ODE), `s_noise` multiplies its noise.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import torch
from torch import Tensor

from .base import ModelCall, Steps, intervals
from .noise import LatentNoise
from .process import Process
from .renoise import split_exploding


class _Leap(NamedTuple):
    """The 0-dim coefficients of the exact linear part from one noise level to another."""

    h: Tensor
    """How much the half-log-SNR grows."""
    z: Tensor
    """`h` as the reverse SDE sees it, `(1 + eta) * h`."""
    kept: Tensor
    """Factor of `x`."""
    clean: Tensor
    """Factor of the clean latent in `x` at the end: alpha."""
    spread: Tensor
    """Standard deviation of the noise the step adds, over its final sigma."""


def _leap(process: Process, sigma: Tensor, sigma_next: Tensor, eta: float) -> _Leap:
    start, end = process.half_log_snr(sigma), process.half_log_snr(sigma_next)
    h = end - start
    return _Leap(
        h=h,
        z=h * (eta + 1),
        kept=sigma_next / sigma * (-h * eta).exp(),
        clean=sigma_next * end.exp(),
        spread=(-2 * h * eta).expm1().neg().sqrt(),
    )


def dpmpp_sde(
    x: Tensor,
    sigmas: Tensor,
    process: Process,
    noise: LatentNoise,
    *,
    eta: float = 1.0,
    s_noise: float = 1.0,
    r: float = 0.5,
    cpu_tree: bool = True,
) -> Steps:
    """DPM-Solver++ (SDE) (k-diffusion; after arXiv 2211.01095): ancestral, with two calls a step.

    The second call is at share `r` of the step in log-SNR.
    """
    if len(sigmas) <= 1:
        return x
    draw = noise.brownian(sigmas, on_cpu=cpu_tree)
    s_noise = s_noise * process.noise_scale
    share = 1 / (2 * r)

    def advance(x: Tensor, sigma: Tensor, sigma_to: Tensor, time_to: Tensor, prediction: Tensor) -> Tensor:
        time = process.half_log_snr(sigma)
        clean, clean_to = sigma * time.exp(), sigma_to * time_to.exp()
        down, amount = split_exploding(time.neg().exp(), time_to.neg().exp(), eta)
        h = -down.log() - time
        x = clean_to / clean * (-h).exp() * x - clean_to * (-h).expm1() * prediction
        if eta > 0 and s_noise > 0:
            x = x + clean_to * draw(sigma, sigma_to) * s_noise * amount
        return x

    for step, sigma, sigma_next in intervals(process.clip_first(sigmas)):
        denoised = yield ModelCall(x, sigma, step)
        if sigma_next == 0:
            x = denoised
            continue
        time, time_next = process.half_log_snr(sigma), process.half_log_snr(sigma_next)
        time_between = time + r * (time_next - time)
        between = process.sigma_at(time_between)
        ahead = advance(x, sigma, between, time_between, denoised)
        denoised_ahead = yield ModelCall(ahead, between, None)
        x = advance(x, sigma, sigma_next, time_next, (1 - share) * denoised + share * denoised_ahead)
    return x


def dpmpp_2m_sde(
    x: Tensor,
    sigmas: Tensor,
    process: Process,
    noise: LatentNoise,
    *,
    eta: float = 1.0,
    s_noise: float = 1.0,
    solver_type: str = "midpoint",
    cpu_tree: bool = True,
) -> Steps:
    """SDE-DPM-Solver++(2M) (arXiv 2211.01095).

    `solver_type` is how the second-order term is weighted: by the midpoint rule or as Heun's method.
    """
    if len(sigmas) <= 1:
        return x
    draw = noise.brownian(sigmas, on_cpu=cpu_tree)
    s_noise = s_noise * process.noise_scale
    before: tuple[Tensor, Tensor] | None = None
    for step, sigma, sigma_next in intervals(process.clip_first(sigmas)):
        denoised = yield ModelCall(x, sigma, step)
        if sigma_next == 0:
            x = denoised
            continue
        leap = _leap(process, sigma, sigma_next, eta)
        x = leap.kept * x - leap.clean * (-leap.z).expm1() * denoised
        if before is not None:
            denoised_before, h_before = before
            weight = (-leap.z).expm1() / leap.z + 1 if solver_type == "heun" else -0.5 * (-leap.z).expm1()
            x = x + leap.clean * weight * (1 / (h_before / leap.h)) * (denoised - denoised_before)
        if eta > 0 and s_noise > 0:
            x = x + draw(sigma, sigma_next) * sigma_next * leap.spread * s_noise
        before = denoised, leap.h
    return x


def dpmpp_3m_sde(
    x: Tensor,
    sigmas: Tensor,
    process: Process,
    noise: LatentNoise,
    *,
    eta: float = 1.0,
    s_noise: float = 1.0,
    cpu_tree: bool = True,
) -> Steps:
    """SDE-DPM-Solver++(3M) (k-diffusion; after arXiv 2211.01095): the 2M scheme with one more difference."""
    if len(sigmas) <= 1:
        return x
    draw = noise.brownian(sigmas, on_cpu=cpu_tree)
    s_noise = s_noise * process.noise_scale
    before: deque[tuple[Tensor, Tensor]] = deque(maxlen=2)
    for step, sigma, sigma_next in intervals(process.clip_first(sigmas)):
        denoised = yield ModelCall(x, sigma, step)
        if sigma_next == 0:
            x = denoised
            continue
        leap = _leap(process, sigma, sigma_next, eta)
        x = leap.kept * x - leap.clean * (-leap.z).expm1() * denoised
        if before:
            phi_2 = (-leap.z).expm1() / leap.z + 1
            denoised_1, h_1 = before[0]
            ratio_1 = h_1 / leap.h
            first = (denoised - denoised_1) / ratio_1
            if len(before) == 1:
                x = x + leap.clean * phi_2 * first
            else:
                denoised_2, h_2 = before[1]
                ratio_2 = h_2 / leap.h
                change = first - (denoised_1 - denoised_2) / ratio_2
                first = first + change * ratio_1 / (ratio_1 + ratio_2)
                second = change / (ratio_1 + ratio_2)
                phi_3 = phi_2 / leap.z - 0.5
                x = x + leap.clean * phi_2 * first - leap.clean * phi_3 * second
        if eta > 0 and s_noise > 0:
            x = x + draw(sigma, sigma_next) * sigma_next * leap.spread * s_noise
        before.appendleft((denoised, leap.h))
    return x


def seeds_2(
    x: Tensor,
    sigmas: Tensor,
    process: Process,
    noise: LatentNoise,
    *,
    eta: float = 1.0,
    s_noise: float = 1.0,
    r: float = 0.5,
    solver_type: str = "phi_1",
) -> Steps:
    """SEEDS-2 (arXiv 2305.14267): two calls a step, the second at share `r` of it in log-SNR.

    `solver_type` is how the two predictions are combined: extrapolated in one (phi_1) or by exponential
    Runge-Kutta weights (phi_2; with r = 1 exponential Heun).
    """
    draw = noise.gaussian()
    s_noise = s_noise * process.noise_scale
    stochastic = eta > 0 and s_noise > 0
    for step, sigma, sigma_next in intervals(process.clip_first(sigmas)):
        denoised = yield ModelCall(x, sigma, step)
        if sigma_next == 0:
            x = denoised
            continue
        time_between = torch.lerp(process.half_log_snr(sigma), process.half_log_snr(sigma_next), r)
        between = process.sigma_at(time_between)
        leap = _leap(process, sigma, sigma_next, eta)

        ahead = between / sigma * (-r * leap.h * eta).exp() * x
        ahead = ahead - between * time_between.exp() * (-r * leap.z).expm1() * denoised
        if stochastic:
            first = (-2 * r * leap.h * eta).expm1().neg().sqrt() * draw(sigma, between)
            ahead = ahead + first * between * s_noise
        denoised_ahead = yield ModelCall(ahead, between, None)

        phi_1 = (-leap.z).expm1()
        if solver_type == "phi_1":
            gain = leap.clean * phi_1 * torch.lerp(denoised, denoised_ahead, 1 / (2 * r))
        else:
            weight = (phi_1 + leap.z) / -leap.z / r
            gain = leap.clean * ((phi_1 - weight) * denoised + weight * denoised_ahead)
        x = leap.kept * x - gain
        if stochastic:
            # The noise of the whole step: what the first part added, decayed, and what the rest of it adds.
            rest = (r - 1) * leap.h * eta
            both = first * rest.exp() + (2 * rest).expm1().neg().sqrt() * draw(between, sigma_next)
            x = x + both * sigma_next * s_noise
    return x


def er_sde(
    x: Tensor, sigmas: Tensor, process: Process, noise: LatentNoise, *, s_noise: float = 1.0, max_stage: int = 3
) -> Steps:
    """ER-SDE-Solver (arXiv 2309.06169) of order `max_stage`, with the paper's noise scale.

    Steps in `level = sigma / (1 - sigma)`; the higher orders integrate numerically, as the paper does.
    """
    draw = noise.gaussian()
    s_noise = s_noise * process.noise_scale
    before: deque[tuple[Tensor, Tensor, Tensor | None]] = deque(maxlen=2)
    for step, sigma, sigma_next in intervals(process.clip_first(sigmas)):
        denoised = yield ModelCall(x, sigma, step)
        if sigma_next == 0:
            x = denoised
            continue
        level, level_next = process.half_log_snr(sigma).neg().exp(), process.half_log_snr(sigma_next).neg().exp()
        clean, clean_next = sigma / level, sigma_next / level_next
        scale_next = _er_noise_scale(level_next)
        kept = scale_next / _er_noise_scale(level)
        x = clean_next / clean * kept * x + clean_next * (1 - kept) * denoised

        first: Tensor | None = None
        if before and max_stage >= 2:
            width = level_next - level
            spacing = -width / _ER_POINTS
            points = level_next + torch.arange(_ER_POINTS, dtype=torch.float32) * spacing
            scales = _er_noise_scale(points)
            level_1, denoised_1, first_1 = before[0]
            first = (denoised - denoised_1) / (level - level_1)
            x = x + clean_next * (width + (1 / scales).sum() * spacing * scale_next) * first
            if len(before) == 2 and max_stage >= 3:
                assert first_1 is not None, "the second step and later ones estimate a first derivative"
                second = (first - first_1) / ((level - before[1][0]) / 2)
                moment = ((points - level) / scales).sum() * spacing
                x = x + clean_next * (width**2 / 2 + moment * scale_next) * second
        if s_noise > 0:
            amount = (level_next**2 - level**2 * kept**2).sqrt().nan_to_num(nan=0.0)
            x = x + clean_next * draw(sigma, sigma_next) * s_noise * amount
        before.appendleft((level, denoised, first))
    return x


_ER_POINTS = 200


def _er_noise_scale(level: Tensor) -> Tensor:
    return level * ((level**0.3).exp() + 10.0)
