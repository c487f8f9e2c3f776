"""Records programs of ComfyUI's samplers in this process, for runs without a ComfyUI server."""

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

if "comfy.cli_args" not in sys.modules:  # otherwise ComfyUI is imported already, with its switches set
    comfy_on_path()

import comfy.model_sampling
import comfy.samplers


class FlowSampling(comfy.model_sampling.ModelSamplingDiscreteFlow, comfy.model_sampling.CONST):  # type: ignore[misc]
    """ComfyUI's sampling of a flow model, with a shift, a multiplier of the time and a noise scale."""

    def __init__(self, shift: float = 1.0, multiplier: float = 1.0, noise_scale: float = 1.0) -> None:
        settings = {"shift": shift, "multiplier": multiplier, "noise_scale": noise_scale}
        super().__init__(SimpleNamespace(sampling_settings=settings))


class NoiseSampling(comfy.model_sampling.ModelSamplingDiscrete, comfy.model_sampling.EPS):  # type: ignore[misc]
    """ComfyUI's sampling of a model that predicts noise, with the usual table of noise levels."""


class VelocitySampling(comfy.model_sampling.ModelSamplingDiscrete, comfy.model_sampling.V_PREDICTION):  # type: ignore[misc]
    """ComfyUI's sampling of a model that predicts v, with the usual table of noise levels."""


@functools.cache
def recording(module: str) -> ModuleType:
    """Return a module of `nodes/model/recording`."""
    return nodes_module(f"model.recording.{module}", ForGood())


@functools.cache
def _own_samplers() -> None:
    nodes_module("samplers", ForGood()).register_samplers()


def guider_of(model_sampling: Any, cfg: float = 2.0) -> Any:
    """Return a CFGGuider of ComfyUI's whose model has no network."""
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
    """Return a sampler run, as a SAMPLER_SAMPLE wrapper would receive it."""
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
    """Record the sampler that KSampler lists as `name`, and return its program."""
    _own_samplers()
    sampler = comfy.samplers.ksampler(name, dict(options or {})) if options else comfy.samplers.sampler_object(name)
    run = run_of(sampler, model_sampling or FlowSampling(), sigmas, x, seed)
    recorded = recording("record").recorded(run)
    assert recorded.program is not None, recorded.reason
    return recorded.program  # type: ignore[no-any-return]


def encoded_program(name: str, sigmas: Tensor, x: Tensor, **settings: Any) -> Tensor:
    """Return the program of a sampler as a request's tensor."""
    return encoded(program_of(name, sigmas, torch.empty_like(x), **settings))
