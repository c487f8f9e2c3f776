"""Checks of a run before its plan is made. Each check refuses with one sentence, and nothing is loaded yet."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ....parallel_backend.conditioning import Conditioning, runs_alone
from ....parallel_backend.diffusion import FunctionRecipe, Value
from ....parallel_backend.errors import Refused
from ....parallel_backend.plan import ParallelPlan
from ....parallel_backend.weights.adapters.lora import AdapterSet
from ..conditioning import of_prompt
from ..features import attention_override, block_attention
from ..features.block_attention import function_in
from ..features.node_functions import GUIDANCE_FEATURE, attention_guidance_functions, refuse_differing
from ..own_code import name_of
from ..proxy import DiffusionProxy
from ..sampler_run import SamplerRun
from .message import features_of, refuse_what_cannot_work

OF_A_MASK = "set it from 0 to 1"


@dataclass(frozen=True)
class Checked:
    """The results of the checks.

    Attributes:
        adapters: the changes of the weights.
        attention: the choice of attention kernels, in words.
        compared: functions that compare the rows of an attention.
        coupling: the reason why the rows of a call change one another, as the beginning of a sentence; empty if they do not.
        overridden: True if a node's function replaces attention, or if a node injects attention into blocks.
        injected: the function that injects attention into blocks; None if there is none.
    """

    adapters: AdapterSet
    attention: str
    compared: Sequence[FunctionRecipe]
    coupling: str
    overridden: bool
    injected: Any


def check_run(run: SamplerRun, proxy: DiffusionProxy) -> Checked:
    """Check the settings, prompts, numbers and sizes of a run.

    Raises:
        Refused: the run needs something that workers cannot do.
    """
    remote, guider = proxy.remote, run.guider
    refuse_differing(run.transformer_options, proxy.skeleton)
    refuse_what_cannot_work(run)
    refuse_strengths(guider)
    refuse_sigmas(run.sigmas, guider.inner_model.model_sampling)
    dtype = guider.inner_model.get_dtype_inference()
    attention = remote.attention(dtype)
    features = features_of(run)
    overridden = bool(attention_override.FEATURE.values(features))
    if overridden:
        attention = f"by {name_of(run.transformer_options[attention_override.OPTION])}"
    injected = function_in(run.transformer_options) if block_attention.FEATURE.values(features) else None
    if injected is not None:
        attention = f"by {name_of(injected)}"
    adapters = proxy.adapters(run.transformer_options, run.noise.shape)
    prompts = []
    for entries in guider.conds.values():
        for entry in entries:
            conditioning = of_prompt(entry["model_conds"], dtype, run.noise.shape[0])
            prompts.append(conditioning)
            remote.check(run.noise, conditioning)
            refuse_guidance(conditioning.tensors)
            if isinstance(entry.get("mask"), Tensor):
                remote.check_numbers("mask of a prompt", entry["mask"], OF_A_MASK)
    remote.check_numbers("latent", run.latent)
    if run.mask is not None:
        remote.check_numbers("noise mask", run.mask, OF_A_MASK)
    guidance = GUIDANCE_FEATURE.values(features)
    coupling = next(filter(None, map(remote.coupling, shared_calls(prompts, guidance))), "")
    refuse_split(remote.requested_plan, coupling)
    compared = attention_guidance_functions(run.transformer_options)
    return Checked(adapters, attention, compared, coupling, overridden or injected is not None, injected)


def shared_calls(prompts: Sequence[Conditioning], values: Mapping[str, Value]) -> Iterator[Conditioning]:
    """Yield the calls that ComfyUI can make of the prompts. Prompts with equal shapes and values are joined along the batch.

    Args:
        prompts: the conditioning of each prompt.
        values: the values that nodes add to each call.
    """
    groups: dict[object, list[Mapping[str, Tensor]]] = {}
    for number, prompt in enumerate(prompts):
        shapes = sorted((name, tensor.shape) for name, tensor in prompt.tensors.items())
        key = number if runs_alone(prompt.tensors, prompt.values) else (*shapes, *sorted(prompt.values.items()))
        groups.setdefault(key, []).append(prompt.tensors)
    for group in groups.values():
        joined = {
            name: torch.cat([tensors[name] for tensors in group]) for name, first in group[0].items() if first.ndim
        }
        yield Conditioning(joined, dict(values))


def refuse_split(requested_plan: ParallelPlan, coupling: str) -> None:
    """Refuse a plan that computes rows separately which change one another.

    Args:
        requested_plan: the plan.
        coupling: the reason why the rows change one another, or an empty text.

    Raises:
        Refused: the plan has a degree of cfg or data above 1.
    """
    cfg, data = max(1, requested_plan.cfg), max(1, requested_plan.data)
    if coupling and (cfg > 1 or data > 1):
        raise Refused(
            f"{coupling}, but cfg {cfg} and data {data} would compute them on different GPUs: choose "
            "cfg 1 and data 1 in Parallel Plan, and ulysses, ring or pipefusion instead."
        )


STRENGTH = re.compile(r"cfg\d*|(cfg|guidance|neg)_scale|guidance")
"""Attributes of guiders that hold a guidance strength: of CFGGuider, DualCFGGuider, PerpNegGuider and other packs' guiders."""

MOST = math.sqrt(torch.finfo(torch.float32).max)
"""The largest guidance strength whose square fp32 can represent; models and samplers compute such squares."""

TIMES = 1000.0
"""The factor by which ComfyUI's models multiply the conditioning's guidance before they embed it."""


def refuse_strengths(guider: Any) -> None:
    """Raise Refused for a guidance strength that is NaN, infinite, or so large that its square is infinite."""
    for name in ("cfg", *sorted({*vars(guider)} - {"cfg"})):
        value = getattr(guider, name, None) if STRENGTH.fullmatch(name) else None
        if isinstance(value, float | int) and not abs(value) <= MOST:
            raise Refused(f"the {name} is {value:g}, which makes no picture: set it to a number such as 1.")


def refuse_guidance(conditioning: Mapping[str, Tensor]) -> None:
    """Raise Refused if a prompt's guidance overflows in the model's compute dtype when the model embeds it."""
    guidance = conditioning.get("guidance")
    if guidance is not None and not bool(torch.isfinite(guidance * TIMES).all()):
        value = float(guidance.flatten()[0])
        raise Refused(
            f"the guidance is {value:g}, which overflows in {str(guidance.dtype).removeprefix('torch.')}: set it to a number "
            "such as 3.5 in FluxGuidance."
        )


def refuse_sigmas(sigmas: Tensor, model_sampling: Any) -> None:
    """Raise Refused for sigmas that ComfyUI's own samplers turn into NaN or infinity, whatever the model computes.

    Args:
        sigmas: 1-D, at least one.
        model_sampling: the MODEL's sampling object, which scales the last latent by the last sigma.

    Raises:
        Refused: a sigma is not finite, or the last sigma cannot be scaled back to a picture.
    """
    wrong = [number for number, sigma in enumerate(sigmas.tolist(), 1) if not math.isfinite(sigma)]
    if wrong:
        raise Refused(
            f"sigma {wrong[0]} of {len(sigmas)} is {sigmas[wrong[0] - 1].item()}: look at the node that the sigmas come from, "
            "and at the shift of a ModelSampling node, which must be above 0."
        )
    if not math.isfinite(model_sampling.inverse_noise_scaling(sigmas[-1].cpu(), torch.ones(1)).item()):
        raise Refused(
            f"the sigmas end at {sigmas[-1].item():g}, where this model's latent is pure noise and cannot be scaled to a "
            "picture: use sigmas that end below that, at 0 for a finished picture."
        )
