"""Every sampler of KSampler's list, recorded and replayed, against ComfyUI's own function of that name, call by call."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from parallel_backend.denoise.noise import LatentNoise
from parallel_backend.denoise.patch_sampler import Inpaint, PatchSampler
from parallel_backend.denoise.process import Diffusion, Flow, NoiseProcess
from parallel_backend.denoise.replay import DeviceProgram, Prediction
from tests.support.programs import FlowSampling, NoiseSampling, VelocitySampling, recording, run_of
from tests.support.sampler_names import LOCAL, NOT_LOCAL
from tests.support.selection import product, thorough

import comfy.model_sampling  # isort: skip
import comfy.samplers  # isort: skip
from comfy.k_diffusion import sa_solver  # isort: skip
from tests.denoise.comparing import (
    CFG,
    SEED,
    TOLERANCE,
    FluxSampling,
    RecordingModel,
    Run,
    comfy_run,
    distance,
    our_program,
    sampler_of,
    script,
    sides_of,
    smooth,
    start_latent,
)

pytestmark = [
    # torchsde rounds the ends of its path and says so at every query that touches one, for ComfyUI too.
    pytest.mark.filterwarnings("ignore:Should have t:UserWarning"),
    pytest.mark.filterwarnings("ignore:__array_wrap__:DeprecationWarning"),  # ComfyUI's deis
    pytest.mark.filterwarnings("ignore:To copy construct from a tensor:UserWarning"),  # ComfyUI's dpm_fast
]

SCHEDULERS = ("simple", "karras", "normal", "beta", "sgm_uniform")
SHORT, LONG = (1, 2, 5), (20,)
"""Numbers of steps. The quick run has only the short ones: no sampler keeps more than four results of earlier steps."""

OPTIONS: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in LOCAL),
    ("euler_ancestral", {"eta": 0.0}),
    ("euler_ancestral", {"eta": 0.6, "s_noise": 1.1}),
    ("dpmpp_2s_ancestral", {"eta": 0.6, "s_noise": 1.1}),
    ("dpmpp_sde", {"eta": 0.0}),
    ("dpmpp_sde", {"eta": 0.6, "s_noise": 1.1, "r": 0.7}),
    ("dpmpp_2m_sde", {"eta": 0.0}),
    ("dpmpp_2m_sde", {"s_noise": 0.0}),
    ("dpmpp_2m_sde", {"eta": 0.6, "s_noise": 1.1, "solver_type": "heun"}),
    ("dpmpp_3m_sde_gpu", {"eta": 0.6, "s_noise": 1.1}),
    ("lcm", {"s_noise": 1.2, "s_noise_end": 0.4, "noise_clip_std": 1.5}),
    ("er_sde", {"s_noise": 0.0, "max_stage": 1}),
    ("er_sde", {"s_noise": 1.1, "max_stage": 2, "noise_scaler": None}),
    ("er_sde", {"noise_scaler": lambda x: x * (x + 1)}),
    ("seeds_2", {"eta": 0.0}),
    ("seeds_2", {"eta": 0.6, "s_noise": 1.1, "r": 0.7, "solver_type": "phi_2"}),
    ("sa_solver", {"tau_func": sa_solver.get_tau_interval_func(0.9, 0.3, eta=0.7), "simple_order_2": True}),
    ("lms", {"order": 2}),
    ("deis", {"max_order": 4}),
    ("gradient_estimation", {"ge_gamma": 1.5}),
]


NAMED = {
    " ".join([name, *(f"{key} {getattr(value, '__name__', value)}" for key, value in options.items())]): (name, options)
    for name, options in OPTIONS
}


ODD_SCHEDULES = [(0.0, 0.0), (0.3, 0.6, 0.9), (0.9, 0.5, 0.5, 0.0), (0.9, 0.5, 0.7, 0.0), (1.0, -0.5)]
"""Schedules that stand still, rise, or go below 0."""


SAMPLINGS = {
    "flux": FluxSampling(),
    "shifted": FlowSampling(3.0, 500, 0.9),
    "velocity": VelocitySampling(),
    "noise": NoiseSampling(),
}


def denoise(x: Tensor, sigma: Tensor) -> Tensor:
    """Compute a smooth nonlinear element-wise model. Above sigma 1, it sees a latent of unit size.

    Args:
        sigma: one value for each batch item.
    """
    sigma = sigma.view(-1, *[1] * (x.ndim - 1))
    x, sigma = x / sigma.clamp(min=1), sigma.clamp(max=1)
    return 0.8 * torch.tanh((1.2 - sigma) * x) + 0.3 * torch.sin(2.5 * x + 3 * sigma)


def our_run(name: str, options: dict[str, Any], model_sampling: Any, x: Tensor, sigmas: Tensor) -> Run:
    """Run the replayed sampler. Sigmas change in place as ComfyUI's function changes them."""
    made, written = script(name, options, model_sampling, x, sigmas)
    sigmas.copy_(written)
    return our_program(made.program, x, slice(None), denoise)


def schedules(model_sampling: Any, scheduler: str, counts: tuple[int, ...]) -> Iterator[tuple[str, Tensor]]:
    """Yield complete schedules, those of img2img (the end of a longer one), of dpm_2, and schedules that stop early."""
    for count in counts:
        whole = comfy.samplers.calculate_sigmas(model_sampling, scheduler, count)
        yield f"{count} steps", whole
        if count < 5:
            continue
        yield f"the first of {count} steps", whole[: (count + 1) // 2 + 1]
        if count < 20 or scheduler == "simple":  # Brownian paths are slow
            longer = comfy.samplers.calculate_sigmas(model_sampling, scheduler, int(count / 0.6))
            yield f"{count} steps, denoise 0.6", longer[-(count + 1) :]
        if count == 5:
            one_more = comfy.samplers.calculate_sigmas(model_sampling, scheduler, 6)
            yield "5 steps without the last but one", torch.cat([one_more[:-2], one_more[-1:]])


def worst(ours: Run, theirs: Run) -> float:
    """Return the largest distance anywhere in two runs. Their calls must be for the same steps in the same order."""
    assert [call.step for call in ours.calls] == [call.step for call in theirs.calls]
    assert [told[0] for told in ours.told] == [told[0] for told in theirs.told]
    distances = [distance(ours.result, theirs.result)]
    for call, their_call in zip(ours.calls, theirs.calls, strict=True):
        distances += [distance(getattr(call, key), getattr(their_call, key)) for key in ("x", "sigma", "denoised")]
    for told, they_told in zip(ours.told, theirs.told, strict=True):
        distances += [distance(*pair) for pair in zip(told[1:], they_told[1:], strict=True)]
    return max(distances)


@pytest.mark.parametrize("counts", [SHORT, pytest.param(LONG, marks=thorough)], ids=["short", "long"])
@product(sampling=SAMPLINGS.keys(), scheduler=SCHEDULERS, sampler=NAMED)
def test_a_replayed_sampler_equals_comfyuis_at_every_call(
    sampler: tuple[str, dict[str, Any]], scheduler: str, sampling: str, counts: tuple[int, ...]
) -> None:
    name, options = sampler
    model_sampling = SAMPLINGS[sampling]
    for case, sigmas in schedules(model_sampling, scheduler, counts):
        x = start_latent(model_sampling, sigmas, batch=2 if len(sigmas) == 6 else 1)
        ours, theirs = sigmas.clone(), sigmas.clone()
        try:
            expected = comfy_run(sampler_of(name, options), model_sampling, x, theirs, denoise)
        except (AssertionError, IndexError):  # ComfyUI's own function does not accept such a schedule
            continue
        error = worst(our_run(name, options, model_sampling, x, ours), expected)
        assert error <= TOLERANCE, f"{case}: {error:.1e}"
        assert torch.equal(ours, theirs)


@product(sampling=["flux", "velocity"], sigmas=ODD_SCHEDULES)
def test_odd_schedules_give_comfyuis_latent(sampling: str, sigmas: tuple[float, ...]) -> None:
    """Cases in which ComfyUI's gives NaN or raises are skipped. Unrecorded samplers run as ComfyUI's own."""
    model_sampling, schedule = SAMPLINGS[sampling], torch.tensor(sigmas)
    x = start_latent(model_sampling, schedule, batch=1)
    compared = 0
    for name in LOCAL:
        if "dpmpp_sde" in name and min(sigmas) < 0:  # ComfyUI's function never ends
            continue
        try:
            theirs = comfy_run(sampler_of(name, {}), model_sampling, x, schedule.clone(), denoise)
        except (RuntimeError, ValueError, AssertionError, IndexError, ZeroDivisionError):
            continue
        if not theirs.result.isfinite().all():
            continue
        try:
            ours = our_run(name, {}, model_sampling, x, schedule.clone())
        except ValueError:
            continue
        assert worst(ours, theirs) <= TOLERANCE, name
        compared += 1
    assert compared


@pytest.mark.parametrize(("name", "options"), OPTIONS, ids=NAMED)
def test_results_of_patches_join_to_that_of_the_whole_latent(name: str, options: dict[str, Any]) -> None:
    model_sampling = SAMPLINGS["shifted"]
    sigmas = comfy.samplers.calculate_sigmas(model_sampling, "simple", 6)
    x = start_latent(model_sampling, sigmas, batch=2)
    before = x.clone()
    made, _ = script(name, options, model_sampling, x, sigmas)

    complete = our_program(made.program, x, slice(0, 6), smooth)
    parts = [our_program(made.program, x, slice(*rows), smooth) for rows in pairwise((0, 2, 3, 6))]
    assert distance(torch.cat([part.result for part in parts], dim=-2), complete.result) <= TOLERANCE
    for call, *patches in zip(complete.calls, *(part.calls for part in parts), strict=True):
        assert {patch.step for patch in patches} == {call.step}
        assert {float(patch.sigma) for patch in patches} == {float(call.sigma)}
        assert distance(torch.cat([patch.x for patch in patches], dim=-2), call.x) <= TOLERANCE
    assert torch.equal(x, before)


@product(shape=[(2, 1, 40), (1, 4, 3, 6, 5)], name=LOCAL)
def test_latents_of_three_and_five_dimensions_give_comfyuis_result(name: str, shape: tuple[int, ...]) -> None:
    """Three dimensions are video packed with sound, five are video."""
    model_sampling = SAMPLINGS["shifted"]
    sigmas = comfy.samplers.calculate_sigmas(model_sampling, "simple", 4)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(SEED))
    expected = comfy_run(sampler_of(name, {}), model_sampling, x, sigmas.clone(), denoise)
    assert worst(our_run(name, {}, model_sampling, x, sigmas.clone()), expected) <= TOLERANCE


def process_of(model_sampling: Any) -> NoiseProcess:
    if isinstance(model_sampling, VelocitySampling):
        return Diffusion(True, model_sampling.log_sigmas)
    return Flow(getattr(model_sampling, "noise_scale", 1.0))


MASKED = ("euler", "euler_cfg_pp", "euler_ancestral", "heun", "dpmpp_2m", "dpmpp_sde", "uni_pc", "lcm")
"""Samplers with a mask. The mask is applied around the model, and only CFG++ reads more than the model's output."""


@product(name=MASKED, sampling=["shifted", "velocity"])
def test_a_masked_denoise_gives_comfyuis_result(name: str, sampling: str) -> None:
    """The mask is applied around the model as in ComfyUI. CFG++ uses the branches before the mask."""
    model_sampling = SAMPLINGS[sampling]
    sigmas = comfy.samplers.calculate_sigmas(model_sampling, "simple", 5)
    x, noise, latent = (start_latent(model_sampling, sigmas, batch=2) * scale for scale in (1.0, 0.6, 0.3))
    mask = torch.linspace(0, 1, 5).expand(2, 4, 6, 5)
    model = RecordingModel(model_sampling, sigmas.clone(), smooth)
    model.noise, model.latent_image = noise, latent

    def shown(x: Tensor, sigma: Tensor, noise: Tensor, latent_image: Tensor, **_: Any) -> Any:
        return model_sampling.noise_scaling(sigma.view(-1, 1, 1, 1), noise, latent_image)

    model.inner_model.inner_model.scale_latent_inpaint = shown
    arguments: dict[str, Any] = {"model_options": {}, "seed": SEED, "denoise_mask": mask}
    function = sampler_of(name, {}).sampler_function
    expected = function(model, x, sigmas.clone(), extra_args=arguments, callback=model.tell, disable=True)
    run = run_of(sampler_of(name, {}), model_sampling, sigmas, x, SEED, mask, CFG)
    made = DeviceProgram(recording("record").recorded(run).needed(), 4, x.device)
    inpaint = Inpaint(process_of(model_sampling), mask, latent, noise, clean=False)
    ours = PatchSampler(made, x, LatentNoise(tuple(x.shape), x.device), inpaint)
    for call in made.calls():
        positive, negative = sides_of(smooth, ours.model_input, call.sigma.expand(2))
        ours.advance(Prediction(negative + (positive - negative) * CFG, (positive, negative)))
    assert ours.result is not None
    assert distance(ours.result, expected) <= TOLERANCE


def test_ksamplers_list_contains_all_tested_samplers() -> None:
    named = {name for name in comfy.samplers.KSampler.SAMPLERS if not name.startswith("cogvideox")}
    assert named >= {*LOCAL, *NOT_LOCAL}


def test_dpm_adaptive_is_refused_with_the_reason() -> None:
    x, sigmas = torch.zeros(1, 4, 6, 5), torch.tensor([1.0, 0.5, 0.0])
    recorded = recording("record").recorded(run_of(sampler_of("dpm_adaptive", {}), SAMPLINGS["flux"], sigmas, x))
    assert recorded.reason == "the sampler dpm_adaptive, which takes a norm of the latent"
