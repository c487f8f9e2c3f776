"""The trial of a sampler function that is not ComfyUI's: its own result against that of its recorded program."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import comfy.model_management
import torch
from torch import Tensor

from ....parallel_backend.denoise.noise import LatentNoise
from ....parallel_backend.denoise.program import Program
from ....parallel_backend.denoise.replay import DeviceProgram, Prediction
from ....parallel_backend.errors import Refused
from ....parallel_backend.snapshot import Generators, StateSnapshot
from ..sampler_run import SamplerRun
from ..trials import FunctionVerdicts, equal, isolated, random
from .record import call, fixed_of, options_of, recorded, without_side_effects
from .recording_model import Answering, Hooks, RecordingModel, arguments_of_hook, call_hooks, cfg_of, no_network
from .tape import NotRecordable

SEEDS = 1, 2
SIZES = 2, 2, 5, 6
"""The last dimensions of a trial's latent."""

SECONDS = 20.0
"""Longest time in seconds for a run of the function itself."""


def clause_of(run: SamplerRun, verdicts: FunctionVerdicts) -> str:
    """Return the reason why the program of a run's sampler is wrong, as a clause after "which"; empty if it is right."""
    options = options_of(run)
    if not all(isinstance(value, bool | int | float | str | None) for value in options.values()):
        return _tried(run)
    key = json.dumps([dict(options), run.noise.ndim, run.mask is None], sort_keys=True)
    return verdicts.clause(run.sampler.sampler_function, key, lambda: _tried(run))


def _tried(run: SamplerRun) -> str:
    shape = torch.Size([2, run.noise.shape[1], *SIZES[len(SIZES) - (run.noise.ndim - 2) :]])
    small = replace(run, noise=torch.zeros(shape, dtype=run.noise.dtype), mask=None)
    recording = recorded(small)
    if recording.program is None:
        return recording.reason.partition(", which ")[2]
    noise, latent = (random(seed, shape) for seed in SEEDS)
    first = run.sigmas[0].detach().cpu()
    x = run.guider.inner_model.model_sampling.noise_scaling(first, noise, 0.5 * latent).to(run.noise.dtype)
    try:
        plain = _plain(small, x)
    except (comfy.model_management.InterruptProcessingException, Refused):
        raise
    except NotRecordable as refusal:
        return refusal.clause
    except Exception as error:
        return f"raises {type(error).__name__}"
    try:
        whole, *parts = (_replayed(run, recording.program, x, columns) for columns in (slice(6), slice(2), slice(2, 6)))
    except (RuntimeError, TypeError):
        return "uses operations that the workers cannot replay"
    finite = plain.isfinite()
    for result in (whole, torch.cat(parts, dim=-1)):
        if not torch.equal(result.isfinite(), finite) or not equal(result[finite], plain[finite]):
            return "gives a different picture when its recorded operations are replayed"
    return ""


def _predictions(x: Tensor, sigma: Tensor) -> tuple[Tensor, Tensor]:
    """Return fixed predictions for both prompts, computed element by element from x and sigma."""
    sigma = sigma.to(x).view(-1, *[1] * (x.ndim - 1)).clamp(max=1)
    positive, negative = (x * (slope - sigma / 2) / (1 + x * x) for slope in (1.1, 0.8))
    return positive, negative


def _guided(branches: tuple[Tensor, Tensor], cfg: float) -> Tensor:
    positive, negative = branches
    return negative + (positive - negative) * cfg


def _plain_answers(run: SamplerRun) -> Answering:
    ends = time.monotonic() + SECONDS

    def answer(x: Tensor, sigma: Tensor, options: Mapping[str, Any], hooks: Hooks) -> Tensor:
        if time.monotonic() > ends:
            raise NotRecordable(f"runs for more than {SECONDS:.0f} s in a trial")
        branches = _predictions(x, sigma)
        denoised = _guided(branches, cfg_of(run.guider))
        arguments = {"denoised": denoised, "cond_denoised": branches[0], "uncond_denoised": branches[1], "input": x}
        call_hooks(hooks, arguments_of_hook(run.guider, options, sigma) | arguments)
        return denoised

    return answer


def _plain(run: SamplerRun, x: Tensor) -> Tensor:
    """Return the latent that the function itself samples. Restore all state afterwards."""
    with isolated(), no_network(run.guider):
        sigmas = run.sigmas.detach().to("cpu", copy=True)
        extra_args = {**run.extra_args, "denoise_mask": None}
        fixed = StateSnapshot(fixed_of(run))
        recorder = RecordingModel(run.guider, sigmas, extra_args, fixed, _plain_answers(run))
        recorder.noise, recorder.latent_image, recorder.denoise_mask = torch.zeros_like(x), torch.zeros_like(x), None
        with without_side_effects(run, fixed, Generators()) as options:
            output: Tensor = call(
                run.sampler.sampler_function, recorder, x.clone(), sigmas, extra_args, _silent, options
            )
            result = output.to(x.dtype)
    return result


def _silent(event: Mapping[str, Any]) -> None:
    """Ignore a step that the function reports."""


def _replayed(run: SamplerRun, program: Program, x: Tensor, columns: slice) -> Tensor:
    """Return the result of the program for some columns of the latent."""
    share: Callable[[Callable[[], Tensor]], Tensor] = lambda draw: draw()[..., columns]  # noqa: E731
    script = DeviceProgram(program, x.ndim, x.device)
    steps = script.replay(x[..., columns], LatentNoise(tuple(x.shape), x.device, share))
    try:
        request = next(steps)
        while True:
            branches = _predictions(request.x, request.sigma.expand(len(x)))
            request = steps.send(Prediction(_guided(branches, cfg_of(run.guider)), branches))
    except StopIteration as end:
        result: Tensor = end.value
        return result
