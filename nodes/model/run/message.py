"""Translation of a ComfyUI sampling run into a SampleRequest, or into the reason why the run goes step by step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ....parallel_backend.conditioning import CROSS_ATTENTION, Conditioning, in_dict
from ....parallel_backend.denoise.program import encoded
from ....parallel_backend.diffusion import PromptSpec, Value
from ....parallel_backend.errors import Refused
from ....parallel_backend.models.comfyui.small.graph_inputs import GraphInputs, graph_inputs_of
from ....parallel_backend.wire.to_worker import PROGRAM
from ..conditioning import NotSupported, check_prompt, of_prompt, options_of, repeated_text
from ..dtypes import dtype_name
from ..features.compile import compiler_of
from ..features.feature import FeatureCall, unhandled, values_of
from ..features.feature_list import IN_THE_LOOP
from ..features.node_functions import guidance_functions
from ..features.step_cache import cache_of
from ..noise_process import sampling_of
from ..recording.record import Recording
from ..refusals import refuse_prompts, refuse_transformer_options
from ..sampler_run import SamplerRun
from .branches import has_uncond, rows_together


def refuse_what_cannot_work(run: SamplerRun) -> None:
    """Raise Refused for options and prompts that neither the workers' loop nor single forwards can run.

    `networks_of` checks patches, and `features/attention_override.py` checks a function that replaces attention.
    """
    proxy = run.guider.inner_model.diffusion_model
    refuse_transformer_options(unhandled(IN_THE_LOOP, features_of(run)), proxy.skeleton)
    refuse_prompts(run.guider.conds)
    if "multigpu_clones" in run.model_options:
        raise Refused("MultiGPU CFG Split cannot be used with a parallel MODEL: use Parallel Plan instead.")


def features_of(run: SamplerRun) -> FeatureCall:
    """Return the facts about a run whose loop is in the workers that features depend on."""
    model = run.guider.inner_model
    return FeatureCall(run.transformer_options, model.diffusion_model, model.get_dtype_inference())


def example_of(run: SamplerRun) -> Conditioning:
    """Return the inputs of one forward with the run's longest prompt, in the compute dtype."""
    dtype, batch = run.guider.inner_model.get_dtype_inference(), run.noise.shape[0]
    prompts = [entry["model_conds"] for entries in run.guider.conds.values() for entry in entries or ()]
    longest = max(prompts, key=_text_length)
    conditioning = of_prompt(longest, dtype, batch)
    conditioning.values.update(rows_together(run))
    tensors = {
        name: tensor if in_dict(name, conditioning.values) else tensor[:1].expand(batch, *tensor.shape[1:])
        for name, tensor in conditioning.tensors.items()
    }
    return Conditioning({"x": run.noise.to(dtype), "timestep": torch.ones(batch), **tensors}, conditioning.values)


def calls_of(guider: Any) -> list[GraphInputs]:
    """Return the model inputs that ComfyUI's `extra_conds` made of each prompt, without duplicates."""
    entries = (entry["model_conds"] for entries in guider.conds.values() for entry in entries or ())
    calls = [graph_inputs_of({name: condition.cond for name, condition in conds.items()}) for conds in entries]
    return [call for number, call in enumerate(calls) if call not in calls[:number]]


def _text_length(conds: Mapping[str, Any]) -> int:
    return conds[CROSS_ATTENTION].cond.shape[1] if CROSS_ATTENTION in conds else 0


def fields_of(run: SamplerRun, recording: Recording) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the fields and tensors of the SampleRequest for the run.

    Raises:
        NotSupported: the workers' loop cannot do the run; the message gives the reason.
    """
    program = recording.needed()
    model_sampling = run.guider.inner_model.model_sampling
    prompts, tensors = _prompts(run, recording.reads_both_branches)
    sampling = sampling_of(model_sampling, tensors)
    cache = cache_of(run.transformer_options, run.noise, run.guider.inner_model.diffusion_model.skeleton)
    if cache is not None and not program.shows_steps:
        raise NotSupported(f"{cache.kind} with the sampler {program.name}, which reports no steps")
    fields: dict[str, Any] = {
        "compute_dtype": dtype_name(run.guider.inner_model.get_dtype_inference()),
        "sampling": sampling,
        "cfg": float(run.guider.cfg),
        "positive": prompts["positive"],
        "negative": prompts.get("negative"),
        "guidance_functions": guidance_functions(run.model_options) or [],
        "compiler": compiler_of(run.model_options),
        "cache": cache,
    }
    if run.mask is not None:
        fields["clean_inpaint"] = _shows_clean_latent(run, _inpaint_noise(run))
    full = run.sampler.max_denoise(run.guider, run.sigmas)
    tensors["x"] = model_sampling.noise_scaling(run.sigmas[0], run.noise, run.latent, full)
    tensors["sigmas"] = recording.sigmas.float()
    tensors[PROGRAM] = encoded(program)
    if run.mask is not None:
        tensors |= {"mask": run.mask, "latent": run.latent, "noise": _inpaint_noise(run)}
    return fields, tensors


def _prompts(run: SamplerRun, keeps_negative: bool) -> tuple[dict[str, list[PromptSpec]], dict[str, Tensor]]:
    branches = dict(run.guider.conds)
    if not has_uncond(run, keeps_negative):
        branches.pop("negative", None)
    tensors: dict[str, Tensor] = {}
    dtype = run.guider.inner_model.get_dtype_inference()
    options = options_of(run.transformer_options) | values_of(IN_THE_LOOP, features_of(run)) | rows_together(run)
    conds = [entry["model_conds"] for entries in branches.values() for entry in entries or ()]
    kinds = repeated_text(run.guider.inner_model, conds)
    return {
        branch: _branch_prompts(branch, entries, (dtype, run.noise.shape[0]), tensors, options, kinds)
        for branch, entries in branches.items()
        if entries is not None
    }, tensors


def _branch_prompts(
    branch: str,
    entries: Sequence[Mapping[str, Any]],
    latents: tuple[torch.dtype, int],
    tensors: dict[str, Tensor],
    options: Mapping[str, Value],
    more_kinds: tuple[type, ...],
) -> list[PromptSpec]:
    prompts = []
    for index, entry in enumerate(entries):
        if entry.get("control") is not None:
            raise NotSupported("ControlNet")
        check_prompt(entry, more_kinds)
        own = of_prompt(entry["model_conds"], *latents)
        names = {name: f"prompt.{branch}.{index}.{name}" for name in own.tensors}
        tensors |= {names[name]: tensor for name, tensor in own.tensors.items()}
        prompts.append(
            PromptSpec(
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
    """Return True if the model gets the latent without noise outside the mask, as its class computes it at the run's sigmas.

    Raises:
        NotSupported: the model gets neither the latent without noise nor the latent with the sigma's noise.
    """
    model = run.guider.inner_model
    clean = noised = True
    for sigma in run.sigmas:
        at = sigma.to(noise).expand(noise.shape[0])
        model_latent = model.scale_latent_inpaint(
            x=noise, sigma=at, noise=noise, latent_image=run.latent, denoise_mask=run.mask
        )
        clean = clean and model_latent is run.latent
        scales = at.reshape(-1, *[1] * (noise.ndim - 1))
        noised = (
            noised
            and not clean
            and torch.equal(model_latent, model.model_sampling.noise_scaling(scales, noise, run.latent))
        )
        if not clean and not noised:
            raise NotSupported(f"a mask with the model {type(model).__name__}")
    return clean


def _inpaint_noise(run: SamplerRun) -> Tensor:
    """Return the noise for the part outside the mask: the initial noise, or separate noise (ddim)."""
    if not run.sampler.inpaint_options.get("random", False):
        return run.noise
    generator = torch.manual_seed(run.extra_args["seed"] + 1)
    return torch.randn(run.noise.shape, generator=generator, device="cpu").to(run.noise)
