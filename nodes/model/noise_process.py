"""A MODEL's noise process in the form that the workers read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import comfy.model_sampling
from torch import Tensor

from ...parallel_backend.diffusion import DiffusionSettings, FlowSettings, Sampling
from .conditioning import NotSupported

PROCESS_METHODS = ("calculate_input", "calculate_denoised", "noise_scaling", "inverse_noise_scaling")
"""Methods that make a model sampling CONST, EPS or V_PREDICTION if its class inherits them unchanged."""


def sampling_of(sampling: Any, tensors: dict[str, Tensor]) -> Sampling:
    """Return a MODEL's noise process, and add a table of noise levels to `tensors` if the process has one.

    Raises:
        NotSupported: the model sampling is of another kind.
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
