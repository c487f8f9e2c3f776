"""What is refused of a run before it is planned, each in a sentence; nothing is loaded yet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ....parallel_backend.diffusion import FunctionRecipe
from ....parallel_backend.weights.adapters.lora import AdapterSet
from ..conditioning import of_prompt
from ..features.attention_override import OPTION as OVERRIDE
from ..features.block_attention import function_in
from ..features.node_functions import attention_guidance_functions, refuse_differing
from ..own_code import name_of
from ..proxy import DiffusionProxy
from ..sampler_run import SamplerRun
from .coupled_rows import coupling_of, refuse_split
from .message import refuse_what_cannot_work
from .sigmas import refuse_guidance, refuse_sigmas, refuse_strengths

OF_A_MASK = "set it from 0 to 1"


@dataclass(frozen=True)
class Checked:
    """What the checks have found.

    Attributes:
        adapters: what changes the weights.
        attention: the choice of kernels, in words.
        compared: functions that compare the rows of an attention.
        overridden: whether a node's function stands in attention's place, or blocks are handed attention.
        injected: what hands blocks attention; None if nothing does.
        coupling: why no worker can have some of a call's rows alone, as a sentence begins; empty where each can.
    """

    adapters: AdapterSet
    attention: str
    compared: Sequence[FunctionRecipe]
    coupling: str
    overridden: bool
    injected: Any


def check_run(run: SamplerRun, proxy: DiffusionProxy) -> Checked:
    """Check a run's settings, prompts, numbers and sizes.

    Raises:
        Refused: what the workers cannot do at all.
    """
    remote, guider = proxy.remote, run.guider
    refuse_differing(run.transformer_options, proxy.skeleton)
    refuse_what_cannot_work(run)
    refuse_strengths(guider)
    refuse_sigmas(run.sigmas, guider.inner_model.model_sampling)
    dtype = guider.inner_model.get_dtype_inference()
    attention = remote.attention(dtype)
    overridden = bool(proxy.override(run.transformer_options, dtype))
    if overridden:
        attention = f"by {name_of(run.transformer_options[OVERRIDE])}"
    injected = function_in(run.transformer_options) if proxy.injected_attention(run.transformer_options) else None
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
    compared = attention_guidance_functions(run.transformer_options)
    coupling = coupling_of(compared, prompts, remote)
    refuse_split(remote.requested_plan, coupling)
    return Checked(adapters, attention, compared, coupling, overridden or injected is not None, injected)
