"""What is refused of a run before it is planned, each in a sentence; nothing is loaded yet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from ....parallel_backend.diffusion import GuidanceFunction
from ....parallel_backend.weights.adapters.lora import AdapterSet
from ..conditioning import of_prompt
from ..features.attention_guidance import attention_guidance_functions, refuse_split
from ..proxy import DiffusionProxy
from ..sampler_run import SamplerRun
from .message import refuse_what_cannot_work
from .sigmas import refuse_guidance, refuse_sigmas, refuse_strengths

OF_A_MASK = "set it from 0 to 1"


@dataclass(frozen=True)
class Checked:
    """What the checks have found.

    Attributes:
        adapters: what changes the weights.
        attention: the choice of kernels, in words.
        compared: functions that compare the rows of an attention; no worker can have some of them alone.
    """

    adapters: AdapterSet
    attention: str
    compared: Sequence[GuidanceFunction]


def check_run(run: SamplerRun, proxy: DiffusionProxy) -> Checked:
    """Check a run's settings, prompts, numbers and sizes.

    Raises:
        Refused: what the workers cannot do at all.
    """
    remote, guider = proxy.remote, run.guider
    refuse_what_cannot_work(run)
    refuse_strengths(guider)
    refuse_sigmas(run.sigmas, guider.inner_model.model_sampling)
    dtype = guider.inner_model.get_dtype_inference()
    attention = remote.attention(dtype)
    adapters = proxy.adapters(run.transformer_options, run.noise.shape)
    for entries in guider.conds.values():
        for entry in entries:
            given = of_prompt(entry["model_conds"], dtype)
            remote.check(run.noise, given)
            refuse_guidance(given.tensors)
            if isinstance(entry.get("mask"), Tensor):
                remote.check_numbers("mask of a prompt", entry["mask"], OF_A_MASK)
    remote.check_numbers("latent", run.latent)
    if run.mask is not None:
        remote.check_numbers("noise mask", run.mask, OF_A_MASK)
    compared = attention_guidance_functions(run.transformer_options)
    refuse_split(remote.wish, compared)
    return Checked(adapters, attention, compared)
