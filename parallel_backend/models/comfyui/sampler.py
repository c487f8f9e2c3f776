"""ComfyUI's own sampler functions in a worker, as its nodes call them; the model that they call is ours."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType, SimpleNamespace
from typing import Any, Protocol

import torch
from torch import Tensor

from ...diffusion import FlowSettings, Sampling, StockSampler
from .features.guidance import guide_function
from .importing import import_comfyui

Ask = Callable[[Tensor, Tensor, int], tuple[Tensor, Sequence[Tensor]]]
"""A model call by its latent, sigma (0-dim fp32 on the CPU) and step: the denoised latent, and the sides it was made of."""

OnStep = Callable[[int, Tensor, Tensor], None]
"""Told a step, the denoised latent and x, as ComfyUI's function tells them."""

NOT_HERE: Mapping[str, Any] = MappingProxyType({})
"""A prompt, in the place of ComfyUI's: its functions ask whether there is one, and what is in it is with the model calls."""


class Masked(Protocol):
    """Inpainting around the model."""

    def before(self, x: Tensor, sigma: Tensor) -> Tensor:
        """What the model sees."""

    def after(self, denoised: Tensor) -> Tensor:
        """What the sampler is given."""


class SamplerFunction:
    """One of ComfyUI's samplers, by its name in KSampler's list.

    Args:
        options: what the function is given besides; ComfyUI's names.
        seed: of fresh noise.
        cfg: the run's guidance scale.
    """

    def __init__(
        self, name: str, options: Mapping[str, object], stock: StockSampler, sampling: Sampling, seed: int, cfg: float
    ) -> None:
        import_comfyui()
        samplers = importlib.import_module("comfy.samplers")
        self._function = samplers.sampler_object(name).sampler_function
        made = {option: guide_function(function) for option, function in stock.functions.items()}
        self._options = {**options, **made}
        self._cfg = cfg
        self._model_sampling = _model_sampling(stock, sampling)
        self._seed = seed

    def __call__(self, ask: Ask, masked: Masked | None, x: Tensor, sigmas: Tensor, on_step: OnStep) -> Tensor:
        """The final latent from the noisy one `x` (fp32 `[batch, channels, ...]`) down `sigmas` (1-D fp32 on its device).

        Some functions write to the sigmas, as uni_pc does to the last one.
        """
        model = _Model(ask, masked, self._model_sampling, self._cfg)

        def callback(told: Mapping[str, Any]) -> None:
            model.step = told["i"] + 1
            on_step(told["i"], told["denoised"], told["x"])

        arguments = {"model_options": {}, "seed": self._seed}
        result: Tensor = self._function(
            model, x, sigmas, extra_args=arguments, callback=callback, disable=True, **self._options
        )
        return result


class _Model:
    """What a sampler function calls, and asks for the model sampling, in the place of ComfyUI's KSamplerX0Inpaint."""

    def __init__(self, ask: Ask, masked: Masked | None, model_sampling: Any, cfg: float) -> None:
        self._ask = ask
        self._masked = masked
        self._cfg = cfg
        self.inner_model = standing_in(model_sampling)
        self.step = 0

    def __call__(self, x: Tensor, sigma: Tensor, model_options: Mapping[str, Any], seed: int) -> Tensor:
        level = sigma.flatten()[0].to("cpu", torch.float32)
        seen = x if self._masked is None else self._masked.before(x, level)
        denoised, sides = self._ask(seen, level, self.step)
        if sides:
            positive, negative = sides if len(sides) > 1 else (sides[0], torch.zeros_like(sides[0]))
            given = {
                "cond": [NOT_HERE], "uncond": [NOT_HERE] if len(sides) > 1 else None, "cond_denoised": positive,
                "uncond_denoised": negative, "cond_scale": self._cfg, "model": self.inner_model.inner_model, "input": seen,
                "sigma": sigma, "model_options": model_options,
            }  # fmt: skip
            for function in model_options.get("sampler_post_cfg_function", ()):  # the CFG++ samplers' own
                denoised = function({"denoised": denoised, **given})
        return denoised if self._masked is None else self._masked.after(denoised)


def standing_in(model_sampling: Any) -> Any:
    """What ComfyUI's functions find around the model that they call: its model sampling, in both places."""
    patcher = SimpleNamespace(get_model_object={"model_sampling": model_sampling}.__getitem__)
    inner = SimpleNamespace(model_sampling=model_sampling)
    return SimpleNamespace(inner_model=inner, model_patcher=patcher)


def _model_sampling(stock: StockSampler, sampling: Sampling) -> Any:
    """What ComfyUI's functions ask the MODEL's model sampling, which answers as the host's would."""
    kinds = importlib.import_module("comfy.model_sampling")
    made = kinds.CONST() if isinstance(sampling, FlowSettings) else kinds.EPS()
    made.percent_to_sigma = stock.percents.__getitem__
    if isinstance(sampling, FlowSettings):
        made.noise_scale = sampling.noise_scale
    return made
