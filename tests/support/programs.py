"""Programs of ComfyUI's samplers for runs without a ComfyUI around them, recorded in this process."""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from parallel_backend.denoise.program import Program, encoded
from tests.support.comfy_oracle import comfy_on_path
from tests.support.nodes_module import ForGood, nodes_module

if "comfy.cli_args" not in sys.modules:  # where ComfyUI has been imported its switches are known
    comfy_on_path()

import comfy.model_sampling
import comfy.samplers


class FlowSampling(comfy.model_sampling.ModelSamplingDiscreteFlow, comfy.model_sampling.CONST):  # type: ignore[misc]
    """As ComfyUI builds it for flow models, with a shift, a multiplier of the time and a noise scale."""

    def __init__(self, shift: float = 1.0, multiplier: float = 1.0, noise_scale: float = 1.0) -> None:
        settings = {"shift": shift, "multiplier": multiplier, "noise_scale": noise_scale}
        super().__init__(SimpleNamespace(sampling_settings=settings))


class NoiseSampling(comfy.model_sampling.ModelSamplingDiscrete, comfy.model_sampling.EPS):  # type: ignore[misc]
    """Diffusion that predicts noise, with ComfyUI's usual table of noise levels."""


class VelocitySampling(comfy.model_sampling.ModelSamplingDiscrete, comfy.model_sampling.V_PREDICTION):  # type: ignore[misc]
    """The same, predicting v."""


@functools.cache
def recording(module: str) -> ModuleType:
    """A module of the nodes' recording."""
    return nodes_module(f"model.recording.{module}", ForGood())


@functools.cache
def _own_samplers() -> None:
    nodes_module("samplers", ForGood()).register_samplers()


def guider_of(model_sampling: Any, cfg: float = 2.0) -> Any:
    """One of ComfyUI's, of a model without a network."""
    model = nn.Module()
    model.model_sampling, model.diffusion_model = model_sampling, nn.Module()  # type: ignore[assignment]
    guider = comfy.samplers.CFGGuider.__new__(comfy.samplers.CFGGuider)
    guider.model_patcher = SimpleNamespace(get_model_object={"model_sampling": model_sampling}.__getitem__, model=model)
    guider.inner_model, guider.cfg, guider.model_options = model, cfg, {}
    guider.conds = {"positive": [{"strength": 1.0}], "negative": [{"strength": 1.0}]}
    return guider


def run_of(
    sampler: Any,
    model_sampling: Any,
    sigmas: Tensor,
    x: Tensor,
    seed: int = 3,
    mask: Tensor | None = None,
    cfg: float = 2.0,
    model_options: Mapping[str, Any] | None = None,
) -> Any:
    """What a SAMPLER_SAMPLE wrapper would be given of such a run."""
    made = nodes_module("model.sampler_run", ForGood()).SamplerRun
    extra = {"model_options": dict(model_options or {"transformer_options": {}}), "seed": seed}
    return made(sampler, guider_of(model_sampling, cfg), sigmas, extra, x, x, mask)


def program_of(
    name: str,
    sigmas: Tensor,
    x: Tensor,
    *,
    seed: int = 3,
    model_sampling: Any = None,
    options: Mapping[str, Any] | None = None,
) -> Program:
    """The program of the sampler that KSampler's list calls so."""
    _own_samplers()
    sampler = comfy.samplers.ksampler(name, dict(options or {})) if options else comfy.samplers.sampler_object(name)
    run = run_of(sampler, model_sampling or FlowSampling(), sigmas, x, seed)
    recorded = recording("record").recorded(run)
    assert recorded.program is not None, recorded.reason
    return recorded.program  # type: ignore[no-any-return]


def encoded_program(name: str, sigmas: Tensor, x: Tensor, **settings: Any) -> Tensor:
    """The same, as a request's tensor."""
    return encoded(program_of(name, sigmas, torch.empty_like(x), **settings))
