"""From a ComfyUI sampling run to the fields of a Sample message, or the reason why it runs step by step instead."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import comfy.conds
import comfy.k_diffusion.sampling
import comfy.model_sampling
import comfy.samplers
import torch
from comfy.patcher_extension import CallbacksMP, WrappersMP
from torch import Tensor

from ...parallel_backend.denoise import samplers
from ...parallel_backend.errors import Refused
from ...parallel_backend.models.flux import REFERENCE_METHODS, reference_tokens
from ...parallel_backend.wire.messages import DiffusionSettings, FlowSettings, Prompt, Sampling
from .remote import dtype_name
from .unsupported import refuse_prompts, refuse_transformer_options

MODEL_OPTIONS = {"transformer_options", "to_load_options", "disable_cfg1_optimization"}
"""What model_options may hold; anything else changes the denoise in this process."""

WRAPPERS = (WrappersMP.PREDICT_NOISE, WrappersMP.CALC_COND_BATCH, WrappersMP.APPLY_MODEL, WrappersMP.DIFFUSION_MODEL)
"""Wrappers around what the workers do in their loop."""

CALLBACKS = (CallbacksMP.ON_PREPARE_STATE, CallbacksMP.ON_APPLY_HOOKS)
"""Callbacks at every model call."""

PROMPT_KEYS = {"cross_attn", "pooled_output", "guidance", "model_conds", "uuid", "strength", "attention_mask"} | {
    "concat_latent_image", "concat_mask", "ofs", "width", "height", "aspect_ratio",
    "reference_latents", "reference_latents_method",
    "start_percent", "end_percent", "clip_start_percent", "clip_end_percent", "timestep_start", "timestep_end"
}  # fmt: skip
"""What a prompt may hold. Other numbers and words do not reach these models, other tensors and objects might."""

TENSOR_NAMES = {
    "c_crossattn": "context",
    "c_concat": "concat",
    **{name: name for name in ("y", "guidance", "ofs", "attention_mask", "c_size", "c_ar")},
}
"""ComfyUI's names of the model's conditioning -> the model's own."""

PROCESS_METHODS = ("calculate_input", "calculate_denoised", "noise_scaling", "inverse_noise_scaling")
"""What makes a model sampling CONST, EPS or V_PREDICTION: these methods are inherited unchanged."""

REFERENCES = ("ref_latents", "ref_latents_method")
"""ComfyUI's names of what becomes FLUX's reference tokens."""

GUIDER_METHODS = ("__call__", "outer_predict_noise", "predict_noise")
"""What makes a guider one that does plain CFG: these methods of CFGGuider are inherited unchanged, as BasicGuider's are."""


class NotCarried(Exception):
    """The workers' loop does not carry this; it runs with one forward of the model per call instead."""


@dataclass(frozen=True)
class SamplerRun:
    """The arguments of a SAMPLER_SAMPLE wrapper."""

    sampler: Any
    guider: Any
    sigmas: Tensor
    extra_args: Mapping[str, Any]
    noise: Tensor
    latent: Tensor
    mask: Tensor | None

    @property
    def model_options(self) -> Mapping[str, Any]:
        return self.extra_args["model_options"]  # type: ignore[no-any-return]


def refuse_what_cannot_work(run: SamplerRun) -> None:
    """Raise Refused for what neither the loop nor single forwards can do."""
    refuse_transformer_options(run.model_options.get("transformer_options", {}))
    refuse_prompts(run.guider.conds)
    if "multigpu_clones" in run.model_options:
        raise Refused("MultiGPU CFG Split cannot be used with a parallel MODEL: use Parallel Plan instead.")
    for entries in run.guider.conds.values():
        for entry in entries:
            unknown = sorted(set(entry["model_conds"]) - {*TENSOR_NAMES, *REFERENCES})
            if unknown:
                raise Refused(
                    f"{', '.join(unknown)} in the conditioning is not supported by this MODEL yet: remove it."
                )


def two_sided(run: SamplerRun) -> bool:
    """Whether a negative prompt takes part; at cfg 1 ComfyUI leaves it out."""
    unused = math.isclose(run.guider.cfg, 1.0) and not run.model_options.get("disable_cfg1_optimization", False)
    return run.guider.conds.get("negative") is not None and not unused


def tensors_of(model_conds: Mapping[str, Any], latent_shape: Sequence[int], dtype: torch.dtype) -> dict[str, Tensor]:
    """A prompt's tensors by the model's own names, in the dtype that the model computes in, to which ComfyUI casts them."""
    tensors = {
        TENSOR_NAMES[name]: value.cond.to(dtype) for name, value in model_conds.items() if name not in REFERENCES
    }
    if "ref_latents" in model_conds:
        method = model_conds["ref_latents_method"].cond if "ref_latents_method" in model_conds else REFERENCE_METHODS[0]
        latents = [latent.to(dtype) for latent in model_conds["ref_latents"].cond]
        tensors |= reference_tokens(latents, method, latent_shape)
    return tensors


def example_of(run: SamplerRun) -> dict[str, Tensor]:
    """The tensors of one forward of the run's longest prompt, in the compute dtype."""
    dtype, batch = run.guider.inner_model.get_dtype_inference(), run.noise.shape[0]
    prompts = [entry["model_conds"] for entries in run.guider.conds.values() for entry in entries or ()]
    longest = max(prompts, key=lambda conds: conds["c_crossattn"].cond.shape[1])
    given = tensors_of(longest, run.noise.shape, dtype)
    tensors = {name: tensor[:1].expand(batch, *tensor.shape[1:]) for name, tensor in given.items()}
    return {"x": run.noise.to(dtype), "timestep": torch.ones(batch), **tensors}


def fields_of(run: SamplerRun) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The fields and tensors of the Sample message that does the same.

    Raises:
        NotCarried: with the reason.
    """
    _check_surroundings(run)
    name, options = _sampler(run.sampler)
    prompts, tensors = _prompts(run)
    sampling = sampling_of(run.guider.inner_model.model_sampling, tensors)
    if samplers.SAMPLERS[name].own and isinstance(sampling, FlowSettings):
        raise NotCarried(f"the sampler {name}, which is made for CogVideoX, with this model")
    fields: dict[str, Any] = {
        "compute_dtype": dtype_name(run.guider.inner_model.get_dtype_inference()),
        "sampler": name,
        "options": options,
        "seed": run.extra_args["seed"],
        "sampling": sampling,
        "cfg": float(run.guider.cfg),
        "positive": prompts["positive"],
        "negative": prompts.get("negative"),
    }
    full = run.sampler.max_denoise(run.guider, run.sigmas)
    tensors["x"] = run.guider.inner_model.model_sampling.noise_scaling(run.sigmas[0], run.noise, run.latent, full)
    tensors["sigmas"] = run.sigmas.float()
    if run.mask is not None:
        tensors |= {"mask": run.mask, "latent": run.latent, "noise": _inpaint_noise(run)}
    return fields, tensors


def _check_surroundings(run: SamplerRun) -> None:
    guider, options = run.guider, run.model_options
    plain = comfy.samplers.CFGGuider
    if not all(getattr(type(guider), name, None) is getattr(plain, name) for name in GUIDER_METHODS):
        raise NotCarried(f"the guider {type(guider).__name__}")
    if set(run.extra_args) != {"model_options", "seed"} or run.extra_args["seed"] is None:
        raise NotCarried("a sampler with arguments of its own")
    added = sorted(set(options) - MODEL_OPTIONS)
    if added:
        raise NotCarried(f"the model option {added[0]}")
    transformer = options.get("transformer_options", {})
    for kind in WRAPPERS:
        wrappers = transformer.get("wrappers", {}).get(kind, {})
        if names := [str(name or "unnamed") for name, functions in wrappers.items() if functions]:
            raise NotCarried(f"the {kind} wrapper {names[0]}")
    for kind in CALLBACKS:
        if any(transformer.get("callbacks", {}).get(kind, {}).values()):
            raise NotCarried(f"the callback {kind}")


def _sampler(sampler: Any) -> tuple[str, dict[str, Any]]:
    if type(sampler) is not comfy.samplers.KSAMPLER:
        raise NotCarried(f"the sampler {type(sampler).__name__}")
    function = sampler.sampler_function
    stock = comfy.k_diffusion.sampling
    name = next((n for n in samplers.SAMPLERS if getattr(stock, f"sample_{n}", None) is function), None)
    if name is None:
        raise NotCarried(f"the sampler {getattr(function, '__name__', str(function)).removeprefix('sample_')}")
    try:
        samplers.check(name, sampler.extra_options)
    except Refused as reason:
        raise NotCarried(f"this setting: {reason}") from None
    if set(sampler.inpaint_options) - {"random"}:
        raise NotCarried("a sampler with inpaint options")
    return name, {key: value for key, value in sampler.extra_options.items() if value is not None}


def sampling_of(sampling: Any, tensors: dict[str, Tensor]) -> Sampling:
    """A MODEL's noise process; a table of noise levels is added to the tensors.

    Raises:
        NotCarried: it is of another kind.
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
    raise NotCarried(f"the model sampling {kind.__name__}")


def _is(kind: type, comfy_kind: type) -> bool:
    return all(getattr(kind, name, None) is getattr(comfy_kind, name) for name in PROCESS_METHODS)


def _prompts(run: SamplerRun) -> tuple[dict[str, list[Prompt]], dict[str, Tensor]]:
    sides = dict(run.guider.conds)
    if not two_sided(run):
        sides.pop("negative", None)
    tensors: dict[str, Tensor] = {}
    shape = run.noise.shape
    dtype = run.guider.inner_model.get_dtype_inference()
    return {
        side: _side(side, entries, shape, dtype, tensors) for side, entries in sides.items() if entries is not None
    }, tensors


def _side(
    side: str,
    entries: Sequence[Mapping[str, Any]],
    latent_shape: Sequence[int],
    dtype: torch.dtype,
    tensors: dict[str, Tensor],
) -> list[Prompt]:
    prompts = []
    for index, entry in enumerate(entries):
        if entry.get("control") is not None:
            raise NotCarried("ControlNet")
        other = sorted(key for key in set(entry) - PROMPT_KEYS if entry[key] is not None)
        if other:
            raise NotCarried(f"{other[0]} in the conditioning")
        for key, condition in entry["model_conds"].items():
            if type(condition) not in (comfy.conds.CONDRegular, comfy.conds.CONDNoiseShape) and key not in REFERENCES:
                raise NotCarried(f"{key} in the conditioning")
        own = tensors_of(entry["model_conds"], latent_shape, dtype)
        names = {name: f"prompt.{side}.{index}.{name}" for name in own}
        tensors |= {names[name]: tensor for name, tensor in own.items()}
        prompts.append(
            Prompt(
                names,
                strength=float(entry.get("strength", 1.0)),
                start=_number(entry.get("timestep_start")),
                end=_number(entry.get("timestep_end")),
            )
        )
    return prompts


def _number(value: Any) -> float | None:
    return None if value is None else float(value)


def _inpaint_noise(run: SamplerRun) -> Tensor:
    """What the part outside the mask is noised with: the initial noise, or noise of its own (ddim)."""
    if not run.sampler.inpaint_options.get("random", False):
        return run.noise
    generator = torch.manual_seed(run.extra_args["seed"] + 1)
    return torch.randn(run.noise.shape, generator=generator, device="cpu").to(run.noise)
