"""CogVideoX on real workers against diffusers' own pipelines, for every type of model and every kind of plan."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import distributions, version
from pathlib import Path
from typing import Any
from unittest.mock import patch as replaced

import pytest
import torch
from diffusers import AutoencoderKLCogVideoX
from safetensors.torch import load_file
from torch import Tensor

from parallel_backend.diffusion import DiffusionSettings
from parallel_backend.plan import ResolvedPlan
from tests.engine.conftest import TOLERANCE, Runner, prompt_specs
from tests.support.comfy_oracle import comfy_on_path
from tests.support.latents import relative_error
from tests.support.plans import cpu_plan
from tests.support.programs import VelocitySampling, encoded_program
from tests.support.selection import product, thorough
from tests.support.tiny.cogvideox import (
    TEXT_WIDTH,
    TYPES,
    cogvideox,
    denoised_by_diffusers,
    save_cogvideox,
    schedulers,
)
from tests.support.tiny.formats import FORMS, as_stored, save_as
from tests.support.tiny.models import draw, randomise

STEPS = 4
CFG = 6.0
SEED = 3


@dataclass(frozen=True)
class Video:
    """A job: a video's size and texts, the type of model, and one of CogVideoX's own samplers."""

    kind: str
    sampler: str = "cogvideox_ddim"
    frames: int = 4
    height: int = 6
    width: int = 10
    text: int = 7
    batch: int = 1
    form: str = ""
    """The form in which the file stores the blocks' matrices, if not fp32 (one of FORMS)."""

    @property
    def noise(self) -> Tensor:
        """Return the noise `[batch, 16, latent frames, height, width]`."""
        return draw(self.batch, 16, self.frames, self.height, self.width, seed=1)

    @property
    def prompts(self) -> tuple[Tensor, Tensor]:
        """Return the positive and the negative text."""
        return draw(1, self.text, TEXT_WIDTH, seed=2), draw(1, self.text, TEXT_WIDTH, seed=4)

    @property
    def image(self) -> Tensor | None:
        """Return the picture that the video begins with, in pixels, 0 to 1, if the model takes one."""
        return draw(1, 3, 8 * self.height, 8 * self.width, seed=5).sigmoid() if "i2v" in self.kind else None


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return a checkpoint of each type."""
    folder = tmp_path_factory.mktemp("cogvideox")
    plain = {kind: save_cogvideox(folder / f"{kind}.safetensors", kind) for kind in TYPES}
    return plain | {f"1.5 {form}": save_as(form, plain["1.5"]) for form in FORMS}


@functools.cache
def vae() -> AutoencoderKLCogVideoX:
    """Return the VAE that encodes the image for diffusers."""
    blocks = {"block_out_channels": (8, 8, 8, 8), "norm_num_groups": 4, "layers_per_block": 1}
    return randomise(AutoencoderKLCogVideoX(latent_channels=16, scaling_factor=0.7, **blocks), seed=6)


@functools.cache
def original(job: Video) -> Tensor:
    """Return the latent of a job by diffusers' pipeline."""
    transformer = as_stored(cogvideox(job.kind, max_text_seq_length=job.text), job.form)
    scheduler = schedulers(job.kind)[job.sampler]
    beside = {} if job.image is None else {"vae": vae(), "image": job.image}
    with _noise_as_ours(job):
        return denoised_by_diffusers(transformer, scheduler, job.noise, job.prompts, STEPS, CFG, **beside)


@contextmanager
def _noise_as_ours(job: Video) -> Iterator[None]:
    """Give diffusers' DPM steps our noise: seed + 1, in ComfyUI's axis order, drawn once a step."""
    generator = torch.Generator().manual_seed(SEED + 1)
    noises = [torch.randn(job.noise.shape, generator=generator).transpose(1, 2) for _ in range(STEPS)]
    # Between the first and the last step, diffusers draws twice and uses the second draw.
    draws = iter([noises[0], *(noise for each in noises[1:-1] for noise in (each, each)), noises[-1]])
    with replaced("diffusers.schedulers.scheduling_dpm_cogvideox.randn_tensor", lambda *_, **__: next(draws)):
        yield


Ours = Callable[[Video, ResolvedPlan], Tensor]


@pytest.fixture(scope="session")
def ours(run: Runner, files: dict[str, Path]) -> Ours:
    """Return a function that runs a job on the workers."""

    def make(job: Video, plan: ResolvedPlan) -> Tensor:
        alphas = schedulers(job.kind)[job.sampler].alphas_cumprod.clone()
        alphas[-1] = 4.8973451890853435e-08  # as ComfyUI's tables end where the terminal SNR is zero
        table = ((1 - alphas) / alphas).sqrt().float()
        timesteps = torch.arange(999, -1, -1000 // STEPS)
        sigmas = torch.cat([table[timesteps], torch.zeros(1)])
        tensors = {"x": job.noise * (1 + sigmas[0] ** 2).sqrt(), "sigmas": sigmas, "log_sigmas": table.log()}
        tensors["program"] = encoded_program(
            job.sampler, sigmas, job.noise, seed=SEED, model_sampling=VelocitySampling()
        )
        extra: dict[str, Tensor] = {}
        if job.image is not None:
            encoded = vae().encode(2 * job.image[:, :, None] - 1).latent_dist.sample(torch.Generator().manual_seed(0))
            image = torch.zeros_like(job.noise)
            image[:, :, :1] = 0.7 * encoded
            extra["concat"] = image
            if "1.5" in job.kind:
                extra["ofs"] = torch.full((1,), 2.0)
        sides = {
            side: prompt_specs(side, [{"context": context, **extra}], tensors)
            for side, context in zip(("positive", "negative"), job.prompts, strict=True)
        }
        file = files[f"{job.kind} {job.form}".strip()]
        return run.sample("cogvideox", file, tensors, plan, sampling=DiffusionSettings("v"), cfg=CFG, **sides)

    return make


UNEVEN = Video("1.5-i2v", "cogvideox_dpm", frames=6, text=8)
"""A video of 3 * 3 * 5 + 8 tokens, which four ranks cannot share evenly."""

JOBS = [
    (Video("1.5-i2v", "cogvideox_dpm"), cpu_plan()),
    (Video("5b", frames=1, text=3), cpu_plan()),  # a picture
    (Video("2b"), cpu_plan(ulysses=4)),  # 30 heads
    (Video("2b-odd", batch=3), cpu_plan(data=2, cfg=2)),
]
JOBS_OF_ALL = [
    # test_plans_equal_diffusers has each type with its first sampler, and the quick run a type with the other one
    *((Video(kind, sampler), cpu_plan()) for kind in TYPES for sampler in ("cogvideox_ddim", "cogvideox_dpm")),
    # the quick run has a picture, the smallest size; models/test_diffusers has uneven sizes of each type
    *((Video("5b", frames=f, height=h, width=w, text=3), cpu_plan()) for f, h, w in ((5, 4, 4), (13, 4, 6))),
    (Video("2b"), cpu_plan(ulysses=8)),
    # models/test_diffusers has tokens that ranks cannot share evenly, test_plans_equal_diffusers each axis
    *(
        (UNEVEN, plan)
        for plan in (cpu_plan(cfg=2, ring=2, ulysses=2), cpu_plan(cfg=2, ulysses=3), cpu_plan(cfg=2, ulysses=4))
    ),
    # engine/test_products has a batch that data ranks and Ulysses ranks share
    (Video("2b-odd", batch=3), cpu_plan(data=2, ulysses=2)),
]


@pytest.mark.exactness
@pytest.mark.parametrize(
    ("job", "plan"),
    [*JOBS, *(pytest.param(*case, marks=thorough) for case in JOBS_OF_ALL if case not in JOBS)],
    ids=lambda value: f"{value.kind}, {value.frames}" if isinstance(value, Video) else value.degrees,
)
def test_samplers_sizes_uneven_splits_and_batches_equal_diffusers(ours: Ours, job: Video, plan: ResolvedPlan) -> None:
    assert relative_error(ours(job, plan), original(job)) <= TOLERANCE


def named(*plans: ResolvedPlan) -> dict[str, ResolvedPlan]:
    return {plan.describe().split(": ")[-1]: plan for plan in plans}


SMALL = named(
    cpu_plan(cfg=2),
    cpu_plan(ring=2),
    cpu_plan(pipefusion=2, patches=3, warmup_steps=STEPS),
    cpu_plan(ulysses=2, weights="sharded"),
    cpu_plan(ulysses=3),
)


@pytest.mark.exactness
@product(kind=TYPES.keys(), plan=SMALL)
def test_plans_equal_diffusers(ours: Ours, kind: str, plan: ResolvedPlan) -> None:
    job = Video(kind)
    assert relative_error(ours(job, plan), original(job)) <= TOLERANCE


@pytest.mark.exactness
def test_the_workers_have_the_diffusers_that_this_run_is_for(run: Runner, ours: Ours) -> None:
    """The run is for the installed diffusers, or for the one in the folder WORKERS_DIFFUSERS."""
    ours(Video("2b-odd"), cpu_plan())
    folder = os.environ.get("WORKERS_DIFFUSERS")
    expected = next(iter(distributions(name="diffusers", path=[folder]))).version if folder else version("diffusers")
    assert run.diffusers() == {expected}


# engine/test_pixart has each form.
@pytest.mark.parametrize("plan", [cpu_plan(ulysses=2, weights="sharded")])
@pytest.mark.parametrize("form", [pytest.param(form, marks=[thorough] * (form != "Q8_0")) for form in FORMS])
def test_quantised_files_equal_diffusers(ours: Ours, form: str, plan: ResolvedPlan) -> None:
    job = Video("1.5", form=form)
    assert relative_error(ours(job, plan), original(job)) <= TOLERANCE
    assert relative_error(original(job), original(Video("1.5"))) > TOLERANCE, "the form matters"


PIPED = named(
    cpu_plan(cfg=2, pipefusion=2, patches=3),
    cpu_plan(pipefusion=2, ulysses=2, patches=3),
    cpu_plan(pipefusion=2, ring=2, patches=3),
    cpu_plan(pipefusion=3, patches=3),
)
PIPED_QUICK = ("2b-odd", "cfg 2 x pipefusion 2")
"""The type and plan of the quick run; models/test_diffusers has version 1.5 in stages and patches."""


@pytest.mark.parametrize(
    ("kind", "plan"),
    [
        pytest.param(kind, plan, id=f"{kind}-{name}", marks=[thorough] * ((kind, plan.degrees) != PIPED_QUICK))
        for kind in ("2b-odd", "1.5-i2v")
        for name, plan in PIPED.items()
    ],
)
def test_pipefusions_result_depends_only_on_patches_and_warm_up(ours: Ours, kind: str, plan: ResolvedPlan) -> None:
    alone = cpu_plan(patches=plan.patches, warmup_steps=plan.warmup_steps)
    jobs = Video(kind, "cogvideox_dpm"), Video(kind, frames=8, height=4)  # patches of rows, patches of frames
    for job, result in [(job, ours(job, plan)) for job in jobs]:
        assert relative_error(result, ours(job, alone)) <= TOLERANCE
        assert relative_error(result, original(job)) > 10 * TOLERANCE


@pytest.mark.parametrize("workers", [2])
@pytest.mark.parametrize("kind", ["1.5", "1.5-i2v"])
@pytest.mark.parametrize("size", [(6, 10), (7, 9)])
def test_a_forward_of_1_5_equals_comfyuis_own_model(
    run: Runner, files: dict[str, Path], kind: str, size: tuple[int, int], workers: int
) -> None:
    """The forward has two calls, whose texts have two lengths."""
    channels = 32 if "i2v" in kind else 16
    x, texts = draw(2, channels, 4, *size, seed=1), [draw(2, tokens, TEXT_WIDTH, seed=2) for tokens in (7, 12)]
    inputs = {"timestep": torch.tensor([999.0, 20.0])} | ({"ofs": torch.full((2,), 2.0)} if "i2v" in kind else {})
    model = comfyui_model(files[kind])
    expected = torch.cat([model(x, context=text, **inputs) for text in texts])
    own = {"x": x[:, :16], **inputs} | ({"concat": x[:, 16:]} if "i2v" in kind else {})
    calls = [own | {"context": text} for text in texts]
    result = run.forward("cogvideox", files[kind], calls, cpu_plan(ulysses=workers))
    assert relative_error(result, expected) <= TOLERANCE


def comfyui_model(path: Path) -> Any:
    """Return ComfyUI's own CogVideoX with the weights of a file, in fp32."""
    comfy_on_path()
    import comfy.model_detection

    tensors = load_file(path)
    config = comfy.model_detection.model_config_from_unet(tensors, "")
    heads, width = tensors["blocks.0.q.weight"].shape[0], tensors["blocks.0.norm_q.weight"].shape[0]
    config.unet_config |= {"num_attention_heads": heads // width, "attention_head_dim": width}
    config.set_inference_dtype(torch.float32, None)
    model = config.get_model(tensors)
    model.load_model_weights(dict(tensors), "")
    return model.diffusion_model.eval().requires_grad_(False)
