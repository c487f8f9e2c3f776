"""Runs a replayed sampler and ComfyUI's own on a model that records its calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from parallel_backend.denoise.noise import LatentNoise
from parallel_backend.denoise.program import Program, encoded
from parallel_backend.denoise.replay import DeviceProgram, Prediction, script_of
from tests.support.programs import guider_of, recording, run_of

import comfy.model_sampling  # isort: skip
import comfy.samplers  # isort: skip


SEED = 1234
CFG = 1.7
TOLERANCE = 1e-6


class Call(NamedTuple):
    x: Tensor
    sigma: Tensor
    step: int | None
    denoised: Tensor


class Run(NamedTuple):
    calls: list[Call]
    told: list[tuple[int, Tensor, Tensor]]
    """Step, denoised and x of each reported step."""
    result: Tensor


Model = Callable[[Tensor, Tensor], Tensor]


class FluxSampling(comfy.model_sampling.ModelSamplingFlux, comfy.model_sampling.CONST):  # type: ignore[misc]
    """FLUX's noise process as ComfyUI builds it, with shift 1.15."""


def smooth(x: Tensor, sigma: Tensor) -> Tensor:
    """Compute element by element, without functions whose last bit depends on where in memory an element lies."""
    return x * (1.1 - sigma.view(-1, *[1] * (x.ndim - 1))) / (1 + x * x)


def sides_of(model: Model, x: Tensor, sigma: Tensor) -> tuple[Tensor, Tensor]:
    """Return the predictions for two prompts."""
    return model(x, sigma), 0.7 * model(x, sigma)


class RecordingModel(comfy.samplers.KSamplerX0Inpaint):  # type: ignore[misc]
    """A stand-in for the guider with a mask around it, as ComfyUI's samplers expect it. It records every call."""

    def __init__(self, model_sampling: Any, sigmas: Tensor, model: Model, cfg: float = CFG) -> None:
        super().__init__(guider_of(model_sampling, cfg), sigmas)
        self._model = model
        self.calls: list[Call] = []
        self.told: list[tuple[int, Tensor, Tensor]] = []
        self.inner_model.predict_noise = self._guided
        self.inner_model.outer_predict_noise = self._guided

    def _guided(self, x: Tensor, sigma: Tensor, model_options: Mapping[str, Any], seed: int) -> Tensor:
        guider = self.inner_model
        positive, negative = sides_of(self._model, x, sigma)
        prompts = guider.conds["positive"], guider.conds["negative"]
        if guider.cfg == 1.0 and not model_options.get("disable_cfg1_optimization"):
            negative, prompts = torch.zeros_like(positive), (prompts[0], None)
        denoised: Tensor = comfy.samplers.cfg_function(
            guider.inner_model, positive, negative, guider.cfg, x, sigma, model_options, *prompts
        )
        self.calls.append(Call(x.clone(), sigma[0].clone(), None, denoised.clone()))
        return denoised

    def tell(self, report: Mapping[str, Any]) -> None:
        self.calls[-1] = self.calls[-1]._replace(step=report["i"])
        self.told.append((report["i"], report["denoised"].clone(), report["x"].clone()))


def comfy_run(
    sampler: Any, model_sampling: Any, x: Tensor, sigmas: Tensor, model: Model = smooth, cfg: float = CFG
) -> Run:
    """Run one of ComfyUI's KSAMPLERs. Sigmas change in place if the function changes them."""
    recording = RecordingModel(model_sampling, sigmas, model, cfg)
    with torch.inference_mode():
        result = sampler.sampler_function(
            recording,
            x.clone(),
            sigmas,
            extra_args={"model_options": {}, "seed": SEED, "denoise_mask": None},
            callback=recording.tell,
            disable=True,
            **sampler.extra_options,
        )
    return Run(recording.calls, recording.told, result)


def sampler_of(name: str, options: dict[str, Any]) -> Any:
    return comfy.samplers.ksampler(name, options) if options else comfy.samplers.sampler_object(name)


def script(
    name: str, options: dict[str, Any], model_sampling: Any, x: Tensor, sigmas: Tensor
) -> tuple[DeviceProgram, Tensor]:
    """Return the program as a worker makes it from the message, and the sigmas with the function's own writes."""
    run = run_of(sampler_of(name, options), model_sampling, sigmas, torch.empty_like(x), SEED, cfg=CFG)
    recorded = recording("record").recorded(run)
    if recorded.program is None:
        raise ValueError(recorded.reason)
    return script_of(encoded(recorded.program), x.ndim, len(sigmas), x.device), recorded.sigmas


def our_program(program: Program, x: Tensor, rows: slice, model: Model, cfg: float = CFG, branches: int = 2) -> Run:
    """Run a program on some rows of a latent."""
    noise = LatentNoise(tuple(x.shape), x.device, lambda draw: draw()[..., rows, :])
    return replayed(program, x[..., rows, :], noise, model, cfg, branches)


def replayed(program: Program, x: Tensor, noise: LatentNoise, model: Model, cfg: float = CFG, branches: int = 2) -> Run:
    """Run a program on a latent, or on a part of one with its part of the noise. `branches` predictions are given to it."""
    script, calls = DeviceProgram(program, x.ndim, x.device), []
    told: list[tuple[int, Tensor, Tensor]] = []
    with torch.inference_mode():
        try:
            steps = script.replay(x, noise, lambda *each: told.append(each))
            call = next(steps)
            for known in script.calls():
                assert call.sigma.ndim == 0
                assert torch.equal(call.sigma.nan_to_num(), known.sigma.nan_to_num())
                positive, negative = sides_of(model, call.x, call.sigma * call.x.new_ones(len(call.x)))
                denoised = negative + (positive - negative) * cfg
                calls.append(Call(call.x.clone(), call.sigma, known.step if known.opens_step else None, denoised))
                call = steps.send(Prediction(denoised, (positive, negative)[:branches]))
        except StopIteration as end:
            return Run(calls, told, end.value)
    raise AssertionError("a program goes on after its last call")


def start_latent(model_sampling: Any, sigmas: Tensor, batch: int) -> Tensor:
    generator = torch.Generator().manual_seed(SEED)
    clean, noise = torch.randn(2, batch, 4, 6, 5, generator=generator)
    return model_sampling.noise_scaling(sigmas[0], noise, 0.7 * clean)


def distance(ours: Tensor, theirs: Tensor) -> float:
    """Return the relative L2 distance; infinite if only one of the tensors is finite."""
    if torch.equal(ours.isnan(), theirs.isnan()) and torch.equal(ours.nan_to_num(), theirs.nan_to_num()):
        return 0.0
    return float(torch.nan_to_num((ours - theirs).norm() / theirs.norm(), nan=torch.inf))
