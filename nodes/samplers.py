"""CogVideoX's own samplers as ComfyUI sampler functions, equal to diffusers' CogVideoXDDIMScheduler and CogVideoXDPMScheduler.

The samplers step in the variance-preserving latent `y = x / sqrt(sigma² + 1) = alpha * clean + spread * noise`. The schedule
begins at pure noise (zero terminal SNR, arXiv 2305.08891), for which ComfyUI's tables hold a large finite sigma. The samplers
subtract the small part of the latent that a finite sigma keeps, so that the first step is exact.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import comfy.k_diffusion.sampling
import comfy.samplers
import torch
from torch import Tensor
from tqdm.auto import tqdm

from ..parallel_backend.diffusion import FlowSettings
from ..parallel_backend.errors import Refused
from .model.conditioning import NotSupported
from .model.noise_process import sampling_of

PURE_NOISE = 4000.0
"""Smallest sigma that means infinity. ComfyUI's tables end at 4518 if the terminal SNR is zero, and far below otherwise."""

Callback = Callable[[dict[str, Any]], None] | None


def register_samplers() -> None:
    """Add the samplers to the lists of ComfyUI's sampler nodes."""
    for function in (sample_cogvideox_ddim, sample_cogvideox_dpm):
        setattr(comfy.k_diffusion.sampling, function.__name__, function)
        name = function.__name__.removeprefix("sample_")
        for names in (comfy.samplers.KSampler.SAMPLERS, comfy.samplers.SAMPLER_NAMES, comfy.samplers.KSAMPLER_NAMES):
            if name not in names:
                names.append(name)


@torch.no_grad()
def sample_cogvideox_ddim(
    model: Any,
    x: Tensor,
    sigmas: Tensor,
    extra_args: Any = None,
    callback: Callback = None,
    disable: bool | None = None,
) -> Tensor:
    """Sample by DDIM (arXiv 2010.02502), as CogVideoX's code writes it."""
    _refuse_other_models(model, "cogvideox_ddim")
    y = x / _norm(sigmas[0])
    for step, (sigma, sigma_next) in enumerate(tqdm([*pairwise(sigmas.cpu())], disable=disable)):
        clean = _clean(model, y, step, sigma, extra_args, callback)
        here, then = _level(sigma), _level(sigma_next)
        ratio = then.spread / here.spread
        y = ratio * y + (then.alpha - here.alpha * ratio) * clean
    return y * _norm(sigmas[-1])


@torch.no_grad()
def sample_cogvideox_dpm(
    model: Any,
    x: Tensor,
    sigmas: Tensor,
    extra_args: Any = None,
    callback: Callback = None,
    disable: bool | None = None,
) -> Tensor:
    """Sample by SDE-DPM-Solver++(2M) (arXiv 2211.01095), as CogVideoX's code writes it.

    All steps but the last add fresh noise.
    """
    _refuse_other_models(model, "cogvideox_dpm")
    noise = comfy.k_diffusion.sampling.default_noise_sampler(x, seed=(extra_args or {}).get("seed"))
    y = x / _norm(sigmas[0])
    before: tuple[Tensor, Tensor] | None = None
    for step, (sigma, sigma_next) in enumerate(tqdm([*pairwise(sigmas.cpu())], disable=disable)):
        clean = _clean(model, y, step, sigma, extra_args, callback)
        here, then = _level(sigma), _level(sigma_next)
        h = then.half_log_snr - here.half_log_snr
        prediction = clean
        if before is not None and sigma_next > 0:
            clean_before, h_before = before
            share = h / (2 * h_before)
            prediction = (1 + share) * clean - share * clean_before
        y = then.spread / here.spread * (-h).exp() * y - (-2 * h).expm1() * then.alpha * prediction
        if sigma_next > 0:
            y = y + then.spread * (1 - (-2 * h).exp()) ** 0.5 * noise(sigma, sigma_next)
        before = clean, h
    return y * _norm(sigmas[-1])


class _Level(NamedTuple):
    """A noise level. All fields are 0-dim fp64 tensors on the CPU."""

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
    return (sigma.cpu().double() ** 2 + 1) ** 0.5


def _clean(model: Any, y: Tensor, step: int, sigma: Tensor, extra_args: Any, callback: Callback) -> Tensor:
    """Return the predicted clean latent; at pure noise, without the part of `y` that a finite sigma keeps."""
    x, norm = y * _norm(sigma), _norm(sigma)
    denoised: Tensor = model(x, sigma * x.new_ones([x.shape[0]]), **(extra_args or {}))
    if callback is not None:
        callback({"x": x, "i": step, "sigma": sigma, "sigma_hat": sigma, "denoised": denoised})
    if sigma < PURE_NOISE:
        return denoised
    return (denoised - y / norm) / (sigma.double() / norm)


def _refuse_other_models(model: Any, name: str) -> None:
    """Raise Refused for a model that this sampler does not work for."""
    try:
        sampling = sampling_of(model.inner_model.inner_model.model_sampling, {})
    except NotSupported as reason:
        raise Refused(
            f"The sampler {name!r} cannot be used with {reason}: choose another one, such as euler."
        ) from None
    if isinstance(sampling, FlowSettings):
        raise Refused(f"The sampler {name!r} is made for CogVideoX: choose another one for this model, such as euler.")
