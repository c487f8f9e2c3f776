"""PixArt-alpha on real workers against diffusers' own pipeline, with text masks of different lengths."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from diffusers import DPMSolverMultistepScheduler, EulerDiscreteScheduler
from torch import Tensor

from parallel_backend.diffusion import DiffusionSettings
from parallel_backend.plan import ResolvedPlan
from tests.engine.conftest import TOLERANCE, Runner, prompt_specs
from tests.support.latents import relative_error
from tests.support.plans import cpu_plan
from tests.support.programs import NoiseSampling, encoded_program
from tests.support.selection import thorough
from tests.support.tiny.formats import FORMS, as_stored, save_as
from tests.support.tiny.models import draw
from tests.support.tiny.pixart import TEXT_WIDTH, denoised_by_diffusers, pixart, save_pixart

STEPS = 4
CFG = 4.5
SCHEDULE = {"beta_start": 0.0001, "beta_end": 0.02, "beta_schedule": "linear"}


@dataclass(frozen=True)
class Picture:
    """A job. `text` counts the tokens that the masks of both prompts let through, of `tokens` in all."""

    sampler: str = "dpmpp_2m"
    micro_conditions: bool = True
    height: int = 10
    width: int = 6
    text: tuple[int, int] = (5, 2)
    tokens: int = 9
    form: str = ""
    """The form in which the file stores the blocks' matrices, if not fp32 (one of FORMS)."""

    @property
    def noise(self) -> Tensor:
        return draw(1, 4, self.height, self.width, seed=1)

    @property
    def prompts(self) -> list[tuple[Tensor, Tensor]]:
        """Return text and mask of the positive and the negative prompt."""
        return [
            (draw(1, self.tokens, TEXT_WIDTH, seed=seed), (torch.arange(self.tokens) < shown)[None].float())
            for seed, shown in zip((2, 3), self.text, strict=True)
        ]

    def scheduler(self) -> DPMSolverMultistepScheduler | EulerDiscreteScheduler:
        if self.sampler == "euler":
            return EulerDiscreteScheduler(**SCHEDULE, timestep_spacing="trailing")
        return DPMSolverMultistepScheduler(**SCHEDULE)


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[bool, str], Path]:
    """Return checkpoints with and without micro-conditions, and the former in every form."""
    folder = tmp_path_factory.mktemp("pixart")
    plain = {micro: save_pixart(folder / f"{micro}.safetensors", micro_conditions=micro) for micro in (True, False)}
    return {(micro, ""): path for micro, path in plain.items()} | {
        (True, form): save_as(form, plain[True]) for form in FORMS
    }


@functools.cache
def original(job: Picture) -> Tensor:
    """Return the latent of a job by diffusers' pipeline."""
    transformer = as_stored(pixart(micro_conditions=job.micro_conditions), job.form)
    return denoised_by_diffusers(transformer, job.scheduler(), job.noise, job.prompts, STEPS, CFG)


Ours = Callable[[Picture, ResolvedPlan], Tensor]


@pytest.fixture(scope="session")
def ours(run: Runner, files: dict[tuple[bool, str], Path]) -> Ours:
    """Return a function that runs a job on the workers."""

    def make(job: Picture, plan: ResolvedPlan) -> Tensor:
        scheduler = job.scheduler()
        scheduler.set_timesteps(STEPS)
        table = ((1 - scheduler.alphas_cumprod) / scheduler.alphas_cumprod).sqrt()
        sigmas = scheduler.sigmas.float()
        tensors = {"x": job.noise * (1 + sigmas[0] ** 2).sqrt(), "sigmas": sigmas, "log_sigmas": table.log()}
        tensors["program"] = encoded_program(job.sampler, sigmas, job.noise, model_sampling=NoiseSampling())
        if job.sampler == "euler":
            tensors["x"] = job.noise * scheduler.init_noise_sigma
        sides = {}
        for side, (context, mask) in zip(("positive", "negative"), job.prompts, strict=True):
            given = {"context": context, "attention_mask": mask}
            if job.micro_conditions:
                given["c_size"] = torch.tensor([[8.0 * job.height, 8.0 * job.width]])
                given["c_ar"] = torch.tensor([[job.height / job.width]])
            sides[side] = prompt_specs(side, [given], tensors)
        file = files[job.micro_conditions, job.form]
        return run.sample("pixart", file, tensors, plan, sampling=DiffusionSettings("eps"), cfg=CFG, **sides)

    return make


PLANS = {
    plan.describe().split(": ")[-1]: plan
    for plan in (
        cpu_plan(),
        cpu_plan(cfg=2),
        cpu_plan(pipefusion=2, warmup_steps=STEPS),
        cpu_plan(ulysses=2),
        cpu_plan(ring=2),
        cpu_plan(ulysses=2, weights="sharded"),
        cpu_plan(ulysses=3),
        cpu_plan(cfg=2, pipefusion=2, ulysses=2, warmup_steps=STEPS),
        cpu_plan(cfg=2, pipefusion=2, ring=2, patches=5, warmup_steps=STEPS),
        cpu_plan(pipefusion=2, ring=2, patches=5, warmup_steps=STEPS),
    )
}
QUICK = ("1 worker", "ulysses 3", "pipefusion 2 x ring 2")
"""Plans of the quick run. The other tests have Ulysses, sharded weights, and both prompts apart in stages."""


@pytest.mark.exactness
@pytest.mark.parametrize(
    "plan",
    [pytest.param(plan, id=name, marks=[thorough] * (not name.startswith(QUICK))) for name, plan in PLANS.items()],
)
def test_plans_equal_diffusers(ours: Ours, plan: ResolvedPlan) -> None:
    jobs = Picture(), Picture(text=(9, 1))
    for job in jobs:
        assert relative_error(ours(job, plan), original(job)) <= TOLERANCE
    assert relative_error(*map(original, jobs)) > 1e-3, "the text mask matters"


@pytest.mark.exactness
@pytest.mark.parametrize(
    ("job", "plan"),
    [
        *((Picture(form=form), cpu_plan(ulysses=2, weights="sharded")) for form in FORMS),
        (Picture(sampler="euler"), cpu_plan(ulysses=2)),
        (Picture(micro_conditions=False), cpu_plan(ulysses=2)),
        (Picture(height=2, width=14, tokens=3, text=(3, 3)), cpu_plan(ulysses=2)),
    ],
    ids=[*FORMS, "euler", "without micro-conditions", "a flat picture"],
)
def test_other_samplers_files_and_sizes_equal_diffusers(ours: Ours, job: Picture, plan: ResolvedPlan) -> None:
    assert relative_error(ours(job, plan), original(job)) <= TOLERANCE
    if job.form:
        assert relative_error(original(job), original(Picture())) > TOLERANCE, "the form matters"


@pytest.mark.parametrize("workers", [4])
def test_pipefusions_result_depends_only_on_patches_and_warm_up(ours: Ours, workers: int) -> None:
    job = Picture()
    reference = ours(job, cpu_plan(pipefusion=2, ulysses=2, patches=3))
    assert relative_error(ours(job, cpu_plan(cfg=2, pipefusion=2, patches=3)), reference) <= TOLERANCE
    assert relative_error(reference, original(job)) > 10 * TOLERANCE
