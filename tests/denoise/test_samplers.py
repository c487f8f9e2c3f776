"""Every sampler against ComfyUI's own function of that name, call by call."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from inspect import signature
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from parallel_backend.denoise.samplers import SAMPLERS, Diffusion, Flow, Process, Steps, check, start
from tests.comfy_oracle import comfy_on_path
from tests.selection import product

comfy_on_path()

import comfy.model_sampling  # noqa: E402
import comfy.samplers  # noqa: E402
from comfy.k_diffusion import sampling as oracle  # noqa: E402

pytestmark = [
    # torchsde rounds the ends of its path and says so at every query that touches one, for ComfyUI too.
    pytest.mark.filterwarnings("ignore:Should have t:UserWarning"),
    pytest.mark.filterwarnings("ignore:__array_wrap__:DeprecationWarning"),  # ComfyUI's deis
]

SEED = 1234
TOLERANCE = 1e-6
SCHEDULERS = ("simple", "karras", "normal", "beta", "sgm_uniform")
STEP_COUNTS = (1, 2, 5, 20)

OPTIONS: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name, sampler in SAMPLERS.items() if not sampler.own),
    ("euler_ancestral", {"eta": 0.0}),
    ("euler_ancestral", {"eta": 0.6, "s_noise": 1.1}),
    ("dpmpp_2s_ancestral", {"eta": 0.0}),
    ("dpmpp_2s_ancestral", {"eta": 0.6, "s_noise": 1.1}),
    ("dpmpp_sde", {"eta": 0.0}),
    ("dpmpp_sde", {"eta": 0.6, "s_noise": 1.1, "r": 0.7}),
    ("dpmpp_2m_sde", {"eta": 0.0}),
    ("dpmpp_2m_sde", {"s_noise": 0.0}),
    ("dpmpp_2m_sde", {"eta": 0.6, "s_noise": 1.1, "solver_type": "heun"}),
    ("dpmpp_3m_sde", {"eta": 0.0}),
    ("dpmpp_3m_sde_gpu", {"eta": 0.6, "s_noise": 1.1}),
    ("lcm", {"s_noise": 1.2, "s_noise_end": 0.4, "noise_clip_std": 1.5}),
    ("er_sde", {"s_noise": 0.0, "max_stage": 1}),
    ("er_sde", {"s_noise": 1.1, "max_stage": 2, "noise_scaler": None}),
    ("seeds_2", {"eta": 0.0}),
    ("seeds_2", {"eta": 0.6, "s_noise": 1.1, "r": 0.7, "solver_type": "phi_2"}),
]


NAMED = {
    " ".join([name, *(f"{key} {value}" for key, value in options.items())]): (name, options)
    for name, options in OPTIONS
}


ODD_SCHEDULES = [(0.0, 0.0), (0.3, 0.6, 0.9), (0.9, 0.5, 0.5, 0.0), (0.9, 0.5, 0.7, 0.0), (1.0, -0.5)]
"""They stand still, rise, or go below 0."""


class FluxSampling(comfy.model_sampling.ModelSamplingFlux, comfy.model_sampling.CONST):
    """As ComfyUI builds it for FLUX: shift 1.15."""


class ShiftedSampling(comfy.model_sampling.ModelSamplingDiscreteFlow, comfy.model_sampling.CONST):
    """As ComfyUI builds it for other flow models, with a shift, a multiplier and a noise scale."""

    def __init__(self) -> None:
        settings = {"shift": 3.0, "multiplier": 500, "noise_scale": 0.9}
        super().__init__(SimpleNamespace(sampling_settings=settings))


class VelocitySampling(comfy.model_sampling.ModelSamplingDiscrete, comfy.model_sampling.V_PREDICTION):
    """Diffusion with ComfyUI's usual table of noise levels."""


SAMPLINGS = {"flux": FluxSampling(), "shifted": ShiftedSampling(), "velocity": VelocitySampling()}
COMFYUIS = [name for name, sampler in SAMPLERS.items() if not sampler.own]


class Call(NamedTuple):
    x: Tensor
    sigma: Tensor
    step: int | None
    denoised: Tensor


Run = tuple[list[Call], Tensor]


def denoise(x: Tensor, sigma: Tensor) -> Tensor:
    """A smooth nonlinear element-wise model; `sigma` one a batch item. Above sigma 1 it sees a latent of unit size."""
    sigma = sigma.view(-1, *[1] * (x.ndim - 1))
    x, sigma = x / sigma.clamp(min=1), sigma.clamp(max=1)
    return 0.8 * torch.tanh((1.2 - sigma) * x) + 0.3 * torch.sin(2.5 * x + 3 * sigma)


class RecordingModel:
    """Stands where ComfyUI's samplers expect the guider, and writes down every call."""

    def __init__(self, model_sampling: Any) -> None:
        patcher = SimpleNamespace(get_model_object={"model_sampling": model_sampling}.__getitem__)
        model = SimpleNamespace(model_sampling=model_sampling)
        self.inner_model = SimpleNamespace(inner_model=model, model_patcher=patcher)
        self.calls: list[Call] = []

    def __call__(self, x: Tensor, sigma: Tensor, **_extra_args: Any) -> Tensor:
        denoised = denoise(x, sigma)
        self.calls.append(Call(x.clone(), sigma[0].clone(), None, denoised.clone()))
        return denoised

    def opened_step(self, report: dict[str, Any]) -> None:
        self.calls[-1] = self.calls[-1]._replace(step=report["i"])
        assert torch.equal(report["denoised"], self.calls[-1].denoised)


def comfy_run(name: str, options: dict[str, Any], model_sampling: Any, x: Tensor, sigmas: Tensor) -> Run:
    model = RecordingModel(model_sampling)
    with torch.inference_mode():
        result = getattr(oracle, f"sample_{name}")(
            model,
            x.clone(),
            sigmas.clone(),
            extra_args={"seed": SEED},
            callback=model.opened_step,
            disable=True,
            **options,
        )
    return model.calls, result


def drive(steps: Steps, model: Callable[[Tensor, Tensor], Tensor] = denoise) -> Run:
    calls = []
    with torch.inference_mode():
        try:
            call = next(steps)
            while True:
                assert call.sigma.ndim == 0
                denoised = model(call.x, call.sigma * call.x.new_ones(len(call.x)))
                calls.append(Call(call.x.clone(), call.sigma, call.step, denoised))
                call = steps.send(denoised)
        except StopIteration as end:
            return calls, end.value


def process_of(model_sampling: Any) -> Process:
    if isinstance(model_sampling, VelocitySampling):
        return Diffusion(True, model_sampling.log_sigmas)
    return Flow(model_sampling.percent_to_sigma(1e-4), getattr(model_sampling, "noise_scale", 1.0))


def our_run(name: str, options: dict[str, Any], model_sampling: Any, x: Tensor, sigmas: Tensor) -> Run:
    return drive(start(name, x, sigmas, process=process_of(model_sampling), seed=SEED, options=options))


def smooth(x: Tensor, sigma: Tensor) -> Tensor:
    """Element-wise without functions whose last bit depends on where in memory an element lies."""
    return x * (1.1 - sigma.view(-1, *[1] * (x.ndim - 1))) / (1 + x * x)


def start_latent(model_sampling: Any, sigmas: Tensor, batch: int) -> Tensor:
    generator = torch.Generator().manual_seed(SEED)
    clean, noise = torch.randn(2, batch, 4, 6, 5, generator=generator)
    return model_sampling.noise_scaling(sigmas[0], noise, 0.7 * clean)


def schedules(model_sampling: Any, scheduler: str) -> Iterator[tuple[str, Tensor]]:
    """Whole schedules, those of img2img (the end of a longer one), of dpm_2, and ones that stop early."""
    for count in STEP_COUNTS:
        whole = comfy.samplers.calculate_sigmas(model_sampling, scheduler, count)
        yield f"{count} steps", whole
        yield f"the first of {count} steps", whole[: (count + 1) // 2 + 1]
        if count < 20 or scheduler == "simple":  # Brownian paths take their time
            longer = comfy.samplers.calculate_sigmas(model_sampling, scheduler, int(count / 0.6))
            yield f"{count} steps, denoise 0.6", longer[-(count + 1) :]
    one_more = comfy.samplers.calculate_sigmas(model_sampling, scheduler, 6)
    yield "5 steps without the last but one", torch.cat([one_more[:-2], one_more[-1:]])


def distance(ours: Tensor, theirs: Tensor) -> float:
    """Relative L2, infinite where one is not finite and the other is."""
    if torch.equal(ours, theirs):
        return 0.0
    return float(torch.nan_to_num((ours - theirs).norm() / theirs.norm(), nan=torch.inf))


def worst(ours: Run, theirs: Run) -> float:
    """The largest distance anywhere in two runs; their calls must be for the same steps in the same order."""
    (our_calls, our_result), (their_calls, their_result) = ours, theirs
    assert [call.step for call in our_calls] == [call.step for call in their_calls]
    distances = [distance(our_result, their_result)]
    for call, their_call in zip(our_calls, their_calls, strict=True):
        distances += [distance(getattr(call, key), getattr(their_call, key)) for key in ("x", "sigma", "denoised")]
    return max(distances)


@product(sampling=SAMPLINGS.keys(), sampler=NAMED)
def test_equals_comfyui_at_every_call(sampler: tuple[str, dict[str, Any]], sampling: str) -> None:
    name, options = sampler
    model_sampling = SAMPLINGS[sampling]
    # On the CPU the _gpu ones are the others; that and the options do not hang on the schedule.
    schedulers = SCHEDULERS[:2] if options or name.endswith("_gpu") else SCHEDULERS
    for scheduler in schedulers:
        for case, sigmas in schedules(model_sampling, scheduler):
            x = start_latent(model_sampling, sigmas, batch=2 if len(sigmas) == 6 else 1)
            given = (name, options, model_sampling, x, sigmas)
            error = worst(our_run(*given), comfy_run(*given))
            assert error <= TOLERANCE, f"{scheduler}, {case}: {error:.1e}"


@pytest.mark.parametrize("name", COMFYUIS)
def test_schedule_of_one_sigma_calls_nothing(name: str) -> None:
    model_sampling, sigmas = SAMPLINGS["flux"], torch.tensor([0.5])
    x = start_latent(model_sampling, sigmas, batch=1)
    calls, result = our_run(name, {}, model_sampling, x, sigmas)
    assert calls == []
    assert torch.equal(result, x)
    if name != "lcm":  # ComfyUI's raises an IndexError
        assert torch.equal(result, comfy_run(name, {}, model_sampling, x, sigmas)[1])


@pytest.mark.parametrize("sigmas", ODD_SCHEDULES, ids=str)
@pytest.mark.parametrize("sampling", ["flux", "velocity"])
def test_odd_schedules_give_a_latent_where_comfyuis_do(sampling: str, sigmas: tuple[float, ...]) -> None:
    """Where ComfyUI's gives NaN or raises, nothing is asked of ours."""
    model_sampling, schedule = SAMPLINGS[sampling], torch.tensor(sigmas)
    x = start_latent(model_sampling, schedule, batch=1)
    compared = 0
    for name in COMFYUIS:
        if name.startswith("dpmpp_sde") and min(sigmas) < 0:  # ComfyUI's never ends
            continue
        given = (name, {}, model_sampling, x, schedule)
        try:
            theirs = comfy_run(*given)
        except (RuntimeError, ValueError, AssertionError):
            continue
        if theirs[1].isfinite().all():
            assert worst(our_run(*given), theirs) <= TOLERANCE, name
            compared += 1
    assert compared


@pytest.mark.parametrize(("name", "options"), OPTIONS, ids=NAMED)
def test_patches_make_up_the_whole(name: str, options: dict[str, Any]) -> None:
    model_sampling = SAMPLINGS["shifted"]
    sigmas = comfy.samplers.calculate_sigmas(model_sampling, "simple", 6)
    x = start_latent(model_sampling, sigmas, batch=2)
    before = x.clone()

    def run(view: Callable[[Tensor], Tensor]) -> Run:
        steps = start(
            name,
            view(x),
            sigmas,
            process=process_of(model_sampling),
            seed=SEED,
            options=options,
            latent_shape=tuple(x.shape),
            share=lambda draw: view(draw()),
        )
        return drive(steps, smooth)

    calls, whole = run(lambda latent: latent)
    parts = [run(lambda latent: latent[..., :2, :]), run(lambda latent: latent[..., 2:, :])]
    assert torch.equal(torch.cat([part[1] for part in parts], dim=-2), whole)
    for call, *patches in zip(calls, *(part[0] for part in parts), strict=True):
        assert {patch.step for patch in patches} == {call.step}
        assert {float(patch.sigma) for patch in patches} == {float(call.sigma)}
        assert torch.equal(torch.cat([patch.x for patch in patches], dim=-2), call.x)
    assert torch.equal(x, before)


@pytest.mark.parametrize("name", COMFYUIS)
def test_names_are_comfyuis(name: str) -> None:
    assert name in comfy.samplers.KSAMPLER_NAMES
    assert set(SAMPLERS[name].options) <= set(signature(getattr(oracle, f"sample_{name}")).parameters)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("uni_pc", {}, "'uni_pc' is not supported; these are: cogvideox_ddim, "),
        (
            "euler",
            {"s_churn": 1.0},
            "'euler' is not supported with the option 's_churn'; its options are: none.",
        ),
        ("er_sde", {"noise_scaler": torch.exp}, "'noise_scaler'; its options are: max_stage, s_noise."),
        ("dpmpp_2m_sde", {"solver_type": "euler"}, "must be midpoint or heun, not 'euler'"),
        ("dpmpp_2m_sde", {"eta": "1"}, "'eta' of 'dpmpp_2m_sde' must be of type float, not '1'"),
        ("er_sde", {"max_stage": 2.5}, "must be of type int, not 2.5"),
    ],
)
def test_what_is_not_supported_is_refused_at_once(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        check(name, options)
    with pytest.raises(ValueError, match=re.escape(message)):
        our_run(name, options, SAMPLINGS["flux"], torch.zeros(1, 4, 2, 2), torch.tensor([1.0, 0.0]))
