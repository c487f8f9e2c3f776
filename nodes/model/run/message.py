"""From a ComfyUI sampling run to the fields of a Sample message, or the reason why it runs step by step instead."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import comfy.model_sampling
import comfy.samplers
import torch
from torch import Tensor

from ....parallel_backend.conditioning import Conditioning, in_dict
from ....parallel_backend.denoise.samplers import SAMPLERS
from ....parallel_backend.diffusion import DiffusionSettings, FlowSettings, Prompt, Sampling, Value
from ....parallel_backend.errors import Refused
from ..conditioning import CROSS_ATTENTION, NotSupported, check_prompt, of_prompt, options_of, repeated_text
from ..features import free_u
from ..features.compile import compiler_of
from ..features.guidance import guides_of
from ..features.networks import PATCHES
from ..features.step_cache import cache_of
from ..refusals import refuse_prompts, refuse_transformer_options
from ..remote_model import dtype_name
from .arguments import SamplerRun
from .sampler import OTHER_SAMPLER, chosen, stock_sampler
from .sides import two_sided

PROCESS_METHODS = ("calculate_input", "calculate_denoised", "noise_scaling", "inverse_noise_scaling")
"""What makes a model sampling CONST, EPS or V_PREDICTION: these methods are inherited unchanged."""


def refuse_what_cannot_work(run: SamplerRun) -> None:
    """Raise Refused for what neither the loop nor single forwards can do; `networks_of` does so for patches."""
    options = {name: value for name, value in run.transformer_options.items() if name != PATCHES}
    refuse_transformer_options(options, run.guider.inner_model.diffusion_model.skeleton)
    refuse_prompts(run.guider.conds)
    if "multigpu_clones" in run.model_options:
        raise Refused("MultiGPU CFG Split cannot be used with a parallel MODEL: use Parallel Plan instead.")


def example_of(run: SamplerRun) -> Conditioning:
    """One forward of the run's longest prompt, in the compute dtype."""
    dtype, batch = run.guider.inner_model.get_dtype_inference(), run.noise.shape[0]
    prompts = [entry["model_conds"] for entries in run.guider.conds.values() for entry in entries or ()]
    longest = max(prompts, key=_text_length)
    given = of_prompt(longest, dtype)
    tensors = {
        name: tensor if in_dict(name, given.values) else tensor[:1].expand(batch, *tensor.shape[1:])
        for name, tensor in given.tensors.items()
    }
    return Conditioning({"x": run.noise.to(dtype), "timestep": torch.ones(batch), **tensors}, given.values)


def _text_length(conds: Mapping[str, Any]) -> int:
    return conds[CROSS_ATTENTION].cond.shape[1] if CROSS_ATTENTION in conds else 0


def fields_of(run: SamplerRun) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The fields and tensors of the Sample message that does the same.

    Raises:
        NotSupported: with the reason.
    """
    if set(run.extra_args) != {"model_options", "seed"} or run.extra_args["seed"] is None:
        raise NotSupported("a sampler with arguments of its own", OTHER_SAMPLER)
    sampler = chosen(run.sampler)
    model_sampling = run.guider.inner_model.model_sampling
    prompts, tensors = _prompts(run)
    sampling = sampling_of(model_sampling, tensors)
    if sampler.stock:
        if bool((run.sigmas[:-1] <= 0).any()):
            raise NotSupported(f"sigmas of 0 before the last one with the sampler {sampler.name}", OTHER_SAMPLER)
    elif SAMPLERS[sampler.name].own and isinstance(sampling, FlowSettings):
        raise NotSupported(f"the sampler {sampler.name}, which is made for CogVideoX, with this model", OTHER_SAMPLER)
    fields: dict[str, Any] = {
        "compute_dtype": dtype_name(run.guider.inner_model.get_dtype_inference()),
        "sampler": sampler.name,
        "options": sampler.options,
        "stock": stock_sampler(model_sampling, sampler.functions) if sampler.stock else None,
        "seed": run.extra_args["seed"],
        "sampling": sampling,
        "cfg": float(run.guider.cfg),
        "positive": prompts["positive"],
        "negative": prompts.get("negative"),
        "guides": guides_of(run.model_options) or [],
        "compiler": compiler_of(run.model_options),
        "cache": cache_of(run.transformer_options, run.noise, run.guider.inner_model.diffusion_model.skeleton),
    }
    if run.mask is not None:
        fields["clean_inpaint"] = _shows_clean_latent(run, _inpaint_noise(run))
    full = run.sampler.max_denoise(run.guider, run.sigmas)
    tensors["x"] = model_sampling.noise_scaling(run.sigmas[0], run.noise, run.latent, full)
    tensors["sigmas"] = run.sigmas.float()
    if run.mask is not None:
        tensors |= {"mask": run.mask, "latent": run.latent, "noise": _inpaint_noise(run)}
    return fields, tensors


def sampling_of(sampling: Any, tensors: dict[str, Tensor]) -> Sampling:
    """A MODEL's noise process; a table of noise levels is added to the tensors.

    Raises:
        NotSupported: it is of another kind.
    """
    kind, comfy_kinds = type(sampling), comfy.model_sampling
    if _is(kind, comfy_kinds.CONST):
        scales: dict[Callable[..., Any], Callable[[], float]] = {
            comfy_kinds.ModelSamplingFlux.timestep: lambda: 1.0,
            comfy_kinds.ModelSamplingDiscreteFlow.timestep: lambda: float(sampling.multiplier),
        }
        if kind.timestep in scales:
            return FlowSettings(
                timestep_scale=scales[kind.timestep](),
                first_sigma=float(sampling.percent_to_sigma(1e-4)),
                noise_scale=float(getattr(sampling, "noise_scale", 1.0)),
            )
    predictions: dict[Literal["eps", "v"], type] = {"eps": comfy_kinds.EPS, "v": comfy_kinds.V_PREDICTION}
    for prediction, comfy_kind in predictions.items():
        by_table = kind.timestep is comfy_kinds.ModelSamplingDiscrete.timestep
        if _is(kind, comfy_kind) and by_table and sampling.sigma_data == 1.0:
            tensors["log_sigmas"] = sampling.log_sigmas
            return DiffusionSettings(prediction)
    raise NotSupported(f"the model sampling {kind.__name__}", "another ModelSampling node")


def _is(kind: type, comfy_kind: type) -> bool:
    return all(getattr(kind, name, None) is getattr(comfy_kind, name) for name in PROCESS_METHODS)


def _prompts(run: SamplerRun) -> tuple[dict[str, list[Prompt]], dict[str, Tensor]]:
    sides = dict(run.guider.conds)
    if not two_sided(run):
        sides.pop("negative", None)
    tensors: dict[str, Tensor] = {}
    dtype = run.guider.inner_model.get_dtype_inference()
    skeleton = run.guider.inner_model.diffusion_model.skeleton
    options = options_of(run.transformer_options) | free_u.values_of(run.transformer_options, skeleton)
    kinds = repeated_text(run.guider.inner_model)
    return {
        side: _side(side, entries, dtype, tensors, options, kinds)
        for side, entries in sides.items()
        if entries is not None
    }, tensors


def _side(
    side: str,
    entries: Sequence[Mapping[str, Any]],
    dtype: torch.dtype,
    tensors: dict[str, Tensor],
    options: Mapping[str, Value],
    more_kinds: tuple[type, ...],
) -> list[Prompt]:
    prompts = []
    for index, entry in enumerate(entries):
        if entry.get("control") is not None:
            raise NotSupported("ControlNet")
        check_prompt(entry, more_kinds)
        own = of_prompt(entry["model_conds"], dtype)
        names = {name: f"prompt.{side}.{index}.{name}" for name in own.tensors}
        tensors |= {names[name]: tensor for name, tensor in own.tensors.items()}
        prompts.append(
            Prompt(
                names,
                strength=float(entry.get("strength", 1.0)),
                start=_number(entry.get("timestep_start")),
                end=_number(entry.get("timestep_end")),
                values={**own.values, **options},
            )
        )
    return prompts


def _number(value: Any) -> float | None:
    return None if value is None else float(value)


def _shows_clean_latent(run: SamplerRun, noise: Tensor) -> bool:
    """Whether a model is shown what is outside the mask without noise; by what its class gives at the run's sigmas.

    Raises:
        NotSupported: it is shown anything else than that, or than the latent with the sigma's noise.
    """
    model = run.guider.inner_model
    clean = noised = True
    for sigma in run.sigmas:
        at = sigma.to(noise).expand(noise.shape[0])
        shown = model.scale_latent_inpaint(
            x=noise, sigma=at, noise=noise, latent_image=run.latent, denoise_mask=run.mask
        )
        clean = clean and shown is run.latent
        scales = at.reshape(-1, *[1] * (noise.ndim - 1))
        noised = (
            noised and not clean and torch.equal(shown, model.model_sampling.noise_scaling(scales, noise, run.latent))
        )
        if not clean and not noised:
            raise NotSupported(f"a mask with the model {type(model).__name__}")
    return clean


def _inpaint_noise(run: SamplerRun) -> Tensor:
    """What the part outside the mask is noised with: the initial noise, or noise of its own (ddim)."""
    if not run.sampler.inpaint_options.get("random", False):
        return run.noise
    generator = torch.manual_seed(run.extra_args["seed"] + 1)
    return torch.randn(run.noise.shape, generator=generator, device="cpu").to(run.noise)
