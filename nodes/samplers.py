"""CogVideoX's own samplers, offered to ComfyUI's sampler nodes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import comfy.k_diffusion.sampling
import comfy.samplers
import torch
from torch import Tensor
from tqdm.auto import trange

from ..parallel_backend.denoise.samplers import SAMPLERS, process_of, start
from ..parallel_backend.errors import Refused
from .model.conditioning import NotSupported
from .model.run.message import sampling_of


def register_samplers() -> None:
    """Add those samplers that ComfyUI has not to the lists of its sampler nodes."""
    for name in (name for name, sampler in SAMPLERS.items() if sampler.own):
        setattr(comfy.k_diffusion.sampling, f"sample_{name}", sampler_function(name))
        for names in (comfy.samplers.KSampler.SAMPLERS, comfy.samplers.SAMPLER_NAMES, comfy.samplers.KSAMPLER_NAMES):
            if name not in names:
                names.append(name)


def sampler_function(name: str) -> Callable[..., Tensor]:
    """One of the backend's samplers in the form of ComfyUI's, for a denoise that runs in ComfyUI's own loop."""

    @torch.no_grad()
    def sample(
        model: Any, x: Tensor, sigmas: Tensor, extra_args: Any = None, callback: Any = None, disable: Any = None
    ) -> Tensor:
        extra_args = extra_args or {}
        tensors: dict[str, Tensor] = {}
        try:
            sampling = sampling_of(model.inner_model.inner_model.model_sampling, tensors)
        except NotSupported as reason:
            raise Refused(
                f"The sampler {name!r} cannot be used with {reason}: choose another one, such as euler."
            ) from None
        process = process_of(sampling, tensors)
        steps = start(name, x.float(), sigmas, process=process, seed=extra_args.get("seed") or 0)
        ones = x.new_ones([x.shape[0]])
        call = next(steps)
        try:
            for _ in trange(len(sigmas) - 1, disable=disable):
                denoised = model(call.x, call.sigma * ones, **extra_args)
                if callback is not None:
                    callback(
                        {
                            "x": call.x,
                            "i": call.step,
                            "sigma": call.sigma,
                            "sigma_hat": call.sigma,
                            "denoised": denoised,
                        }
                    )
                call = steps.send(denoised)
        except StopIteration as end:
            return end.value
        raise AssertionError("a sampler goes on after its last step")

    return sample
