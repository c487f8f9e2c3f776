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
from diffusers import AutoencoderKLCogVideoX, CogVideoXImageToVideoPipeline, CogVideoXPipeline
from safetensors.torch import load_file
from torch import Tensor

from parallel_backend.diffusion import DiffusionSettings, PromptSpec
from parallel_backend.host import Backend
from parallel_backend.plan import ResolvedPlan
from tests.engine.conftest import TOLERANCE, Runner, relative_error
from tests.support.comfy_oracle import comfy_on_path
from tests.support.plans import cpu_plan
from tests.support.programs import VelocitySampling, encoded_program
from tests.support.selection import product, thorough
from tests.support.tiny.cogvideox import TEXT_WIDTH, TYPES, cogvideox, save_cogvideox, schedulers
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
    negative_text: int | None = None
    """Number of tokens of the negative prompt, if it differs from the positive one's."""
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
        return draw(1, self.text, TEXT_WIDTH, seed=2), draw(1, self.negative_text or self.text, TEXT_WIDTH, seed=4)

    @property
    def image(self) -> Tensor:
        """Return the picture that the video begins with, in pixels, 0 to 1."""
        return draw(1, 3, 8 * self.height, 8 * self.width, seed=5).sigmoid()

    @property
    def from_image(self) -> bool:
        return "i2v" in self.kind


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return a checkpoint of each type."""
    folder = tmp_path_factory.mktemp("cogvideox")
    plain = {kind: save_cogvideox(folder / f"{kind}.safetensors", kind) for kind in TYPES}
    return plain | {f"5b {form}": save_as(form, plain["5b"]) for form in FORMS}


@pytest.fixture(scope="session")
def vae() -> AutoencoderKLCogVideoX:
    """Return the VAE that encodes the image for diffusers."""
    blocks = {"block_out_channels": (8, 8, 8, 8), "norm_num_groups": 4, "layers_per_block": 1}
    return randomise(AutoencoderKLCogVideoX(latent_channels=16, scaling_factor=0.7, **blocks), seed=6)


@pytest.fixture(scope="session")
def original(vae: AutoencoderKLCogVideoX) -> Callable[[Video], Tensor]:
    """Return a function that runs a job with diffusers' pipeline."""

    @functools.cache
    def make(job: Video) -> Tensor:
        scheduler = schedulers(job.kind)[job.sampler]
        parts = {
            "tokenizer": None,
            "text_encoder": None,
            "transformer": as_stored(cogvideox(job.kind, max_text_seq_length=job.text), job.form),
            "scheduler": scheduler,
        }
        inputs: dict[str, Any] = {
            "prompt_embeds": job.prompts[0].repeat(job.batch, 1, 1),
            "negative_prompt_embeds": job.prompts[1].repeat(job.batch, 1, 1),
            "height": 8 * job.height,
            "width": 8 * job.width,
            "num_frames": 4 * job.frames - 3,
            "num_inference_steps": STEPS,
            "guidance_scale": CFG,
            "latents": job.noise.transpose(1, 2),
            "output_type": "latent",
        }
        if job.from_image:
            pipeline = CogVideoXImageToVideoPipeline(vae=vae, **parts)
            inputs |= {"image": job.image, "generator": torch.Generator().manual_seed(0)}
        else:
            pipeline = CogVideoXPipeline(vae=vae, **parts)
        pipeline.set_progress_bar_config(disable=True)
        with _noise_as_ours(job):
            result: Tensor = pipeline(**inputs).frames.transpose(1, 2)
        return result

    return make


@contextmanager
def _noise_as_ours(job: Video) -> Iterator[None]:
    """Give diffusers' DPM steps our noise: seed + 1, in ComfyUI's axis order, drawn once a step."""
    generator = torch.Generator().manual_seed(SEED + 1)
    noises = [torch.randn(job.noise.shape, generator=generator).transpose(1, 2) for _ in range(STEPS)]
    # Between the first and the last step, diffusers draws twice and uses the second draw.
    draws = iter([noises[0], *(noise for each in noises[1:-1] for noise in (each, each)), noises[-1]])
    with replaced("diffusers.schedulers.scheduling_dpm_cogvideox.randn_tensor", lambda *_, **__: next(draws)):
        yield


@pytest.fixture(scope="session")
def ours(run: Runner, files: dict[str, Path], vae: AutoencoderKLCogVideoX) -> Callable[[Video, ResolvedPlan], Tensor]:
    """Return a function that runs a job on the workers."""
    return on_workers(run, files, vae)


def on_workers(
    run: Runner, files: dict[str, Path], vae: AutoencoderKLCogVideoX
) -> Callable[[Video, ResolvedPlan], Tensor]:
    """Return a function that runs a job on the workers of a runner."""

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
        if job.from_image:
            encoded = vae.encode(2 * job.image[:, :, None] - 1).latent_dist.sample(torch.Generator().manual_seed(0))
            image = torch.zeros_like(job.noise)
            image[:, :, :1] = 0.7 * encoded
            extra["concat"] = image
            if "1.5" in job.kind:
                extra["ofs"] = torch.full((1,), 2.0)
        sides = {}
        for side, context in zip(("positive", "negative"), job.prompts, strict=True):
            given = {"context": context, **extra}
            tensors |= {f"prompt.{side}.{name}": tensor for name, tensor in given.items()}
            sides[side] = [PromptSpec({name: f"prompt.{side}.{name}" for name in given})]
        return run.sample(
            "cogvideox",
            files[f"{job.kind} {job.form}".strip()],
            tensors,
            plan,
            sampling=DiffusionSettings("v"),
            cfg=CFG,
            **sides,
        )

    return make


Original = Callable[[Video], Tensor]
Ours = Callable[[Video, ResolvedPlan], Tensor]

UNUSUAL_SIZES = [(1, 6, 10), (5, 4, 4), (13, 4, 6)]
SMALL = [
    cpu_plan(cfg=2),
    cpu_plan(ring=2),
    cpu_plan(pipefusion=2, patches=3, warmup_steps=STEPS),
    cpu_plan(ulysses=2, weights="sharded"),
    cpu_plan(ulysses=3),
]


def named(plans: list[ResolvedPlan]) -> dict[str, ResolvedPlan]:
    return {plan.describe().split(": ")[-1]: plan for plan in plans}


ALONE = (("2b", "cogvideox_ddim"), ("1.5-i2v", "cogvideox_dpm"))
"""Types and samplers that the quick run has on one rank. test_plans_equal_diffusers has each type."""


@pytest.mark.exactness
@pytest.mark.parametrize(
    ("kind", "sampler"),
    [
        pytest.param(kind, sampler, marks=[thorough] * ((kind, sampler) not in ALONE))
        for kind in TYPES
        for sampler in ("cogvideox_ddim", "cogvideox_dpm")
    ],
)
def test_one_rank_equals_diffusers(original: Original, ours: Ours, kind: str, sampler: str) -> None:
    job = Video(kind, sampler)
    assert relative_error(ours(job, cpu_plan()), original(job)) <= TOLERANCE


@pytest.mark.exactness
def test_the_workers_have_the_diffusers_that_this_run_is_for(run: Runner, ours: Ours) -> None:
    """The run is for the installed diffusers, or for the one in the folder WORKERS_DIFFUSERS."""
    ours(Video("2b-odd"), cpu_plan())
    folder = os.environ.get("WORKERS_DIFFUSERS")
    expected = next(iter(distributions(name="diffusers", path=[folder]))).version if folder else version("diffusers")
    assert run.diffusers() == {expected}


@thorough
@pytest.mark.parametrize("workers", [2])
def test_the_oldest_diffusers_in_workers_equals_the_installed_one_here(
    original: Original,
    files: dict[str, Path],
    vae: AutoencoderKLCogVideoX,
    monkeypatch: pytest.MonkeyPatch,
    workers: int,
) -> None:
    """`scripts/test.sh --all` also runs the tests marked `exactness` with the oldest diffusers."""
    folder = os.environ["OLDEST_DIFFUSERS"]
    (oldest,) = distributions(name="diffusers", path=[folder])
    monkeypatch.setenv("PYTHONPATH", folder, prepend=os.pathsep)
    run, job = Runner(Backend()), Video("1.5-i2v")
    try:
        result = on_workers(run, files, vae)(job, cpu_plan(ulysses=workers))
        assert run.diffusers() == {oldest.version}
    finally:
        run.close()
    assert relative_error(result, original(job)) <= TOLERANCE


# engine/test_pixart has each form.
@pytest.mark.parametrize("plan", [cpu_plan(ulysses=2, weights="sharded")])
@pytest.mark.parametrize("form", [pytest.param(form, marks=[thorough] * (form != "Q8_0")) for form in FORMS])
def test_quantised_files_equal_diffusers(original: Original, ours: Ours, form: str, plan: ResolvedPlan) -> None:
    job = Video("5b", form=form)
    assert relative_error(ours(job, plan), original(job)) <= TOLERANCE
    assert relative_error(original(job), original(Video("5b"))) > TOLERANCE, "the form matters"


@pytest.mark.exactness
@product(kind=TYPES.keys(), plan=named(SMALL))
def test_plans_equal_diffusers(original: Original, ours: Ours, kind: str, plan: ResolvedPlan) -> None:
    job = Video(kind)
    assert relative_error(ours(job, plan), original(job)) <= TOLERANCE


UNEVEN = Video("1.5-i2v", "cogvideox_dpm", frames=6, text=8)
"""A video of 3 * 3 * 5 + 8 tokens, which four ranks cannot share evenly."""


@pytest.mark.parametrize(
    ("job", "plan"),
    [
        *(  # the quick run has a picture, the smallest size; models/test_diffusers has uneven sizes of each type
            pytest.param(Video("5b", frames=f, height=h, width=w, text=3), cpu_plan(), marks=() if f == 1 else thorough)
            for f, h, w in UNUSUAL_SIZES
        ),
        (Video("2b"), cpu_plan(ulysses=4)),  # 30 heads
        pytest.param(Video("2b"), cpu_plan(ulysses=8), marks=thorough),
        # models/test_diffusers has tokens that ranks cannot share evenly, test_plans_equal_diffusers each axis
        pytest.param(UNEVEN, cpu_plan(cfg=2, ring=2, ulysses=2), marks=thorough),
        pytest.param(UNEVEN, cpu_plan(cfg=2, ulysses=3), marks=thorough),
        pytest.param(UNEVEN, cpu_plan(cfg=2, ulysses=4), marks=thorough),
        (Video("2b-odd", batch=3), cpu_plan(data=2, ulysses=2)),
        (Video("2b-odd", batch=3), cpu_plan(data=2, cfg=2)),
    ],
    ids=lambda value: f"{value.kind}, {value.frames}" if isinstance(value, Video) else value.degrees,
)
def test_unusual_sizes_uneven_splits_and_batches_equal_diffusers(
    original: Original, ours: Ours, job: Video, plan: ResolvedPlan
) -> None:
    assert relative_error(ours(job, plan), original(job)) <= TOLERANCE


# engine/test_products has texts of two lengths under each product.
@thorough
@pytest.mark.parametrize(
    "plan",
    [
        cpu_plan(),
        cpu_plan(cfg=2),
        cpu_plan(cfg=2, ring=2),
        cpu_plan(pipefusion=2, ulysses=2, warmup_steps=STEPS),
    ],
    ids=["one rank", "cfg 2", "cfg 2 x ring 2", "pipefusion 2 x ulysses 2"],
)
def test_prompts_of_different_lengths_equal_diffusers(ours: Ours, plan: ResolvedPlan) -> None:
    """diffusers' pipeline requires equal lengths. Here its transformer computes each prompt alone, between its scheduler's
    steps.
    """
    job = Video("5b", text=3, negative_text=12)
    transformer, scheduler = cogvideox("5b"), schedulers("5b")["cogvideox_ddim"]
    pipeline = CogVideoXPipeline(None, None, None, transformer, scheduler)
    positions = pipeline._prepare_rotary_positional_embeddings(
        8 * job.height, 8 * job.width, job.frames, torch.device("cpu")
    )
    scheduler.set_timesteps(STEPS)
    x = job.noise.transpose(1, 2)
    with torch.no_grad():
        for time in scheduler.timesteps:
            positive, negative = (
                transformer(x, text, time[None], image_rotary_emb=positions, return_dict=False)[0]
                for text in job.prompts
            )
            x = scheduler.step(negative + CFG * (positive - negative), time, x, return_dict=False)[0]
    assert relative_error(ours(job, plan), x.transpose(1, 2)) <= TOLERANCE


PIPED = [
    cpu_plan(cfg=2, pipefusion=2, patches=3),
    cpu_plan(pipefusion=2, ulysses=2, patches=3),
    cpu_plan(pipefusion=2, ring=2, patches=3),
    cpu_plan(pipefusion=3, patches=3),
]


PIPED_QUICK = (("2b-odd", "cfg 2 x pipefusion 2"),)
"""The type and plan of the quick run; models/test_diffusers has version 1.5 in stages and patches."""


@pytest.mark.parametrize(
    ("kind", "plan"),
    [
        pytest.param(kind, plan, id=f"{kind}-{name}", marks=[thorough] * ((kind, plan.degrees) not in PIPED_QUICK))
        for kind in ("2b-odd", "1.5-i2v")
        for name, plan in named(PIPED).items()
    ],
)
def test_pipefusions_result_depends_only_on_patches_and_warm_up(
    original: Original, ours: Ours, kind: str, plan: ResolvedPlan
) -> None:
    alone = cpu_plan(patches=plan.patches, warmup_steps=plan.warmup_steps)
    jobs = Video(kind, "cogvideox_dpm"), Video(kind, frames=8, height=4)  # patches of rows, patches of frames
    for job, result in [(job, ours(job, plan)) for job in jobs]:
        assert relative_error(result, ours(job, alone)) <= TOLERANCE
        assert relative_error(result, original(job)) > 10 * TOLERANCE


@thorough  # engine/test_costs has the formulas, on FLUX.1
@pytest.mark.parametrize(
    "plan",
    [cpu_plan(pipefusion=2), cpu_plan(cfg=2, pipefusion=2), cpu_plan(pipefusion=2, ring=2, ulysses=2, patches=4)],
    ids=lambda plan: plan.degrees,
)
def test_pipefusion_sends_the_bytes_of_its_formula(run: Runner, ours: Ours, plan: ResolvedPlan) -> None:
    job = Video("2b", frames=4, height=8, width=8, text=8)
    hidden, element, batch = 240, 4, 2 // plan.cfg
    tokens = batch * (4 * 4 * 4 + job.text)
    ours(job, plan)
    assert run.answer is not None
    ranks = plan.ring * plan.ulysses
    share = tokens * hidden / ranks * element * STEPS
    for report in run.answer.reports:
        stage = report.rank // ranks % plan.pipefusion
        per_block = share * plan.stages[stage]
        assert report.sent.get("pipefusion", 0) == (0 if stage == plan.pipefusion - 1 else share)
        assert report.sent.get("ulysses", 0) == 4 * (plan.ulysses - 1) / plan.ulysses * per_block
        assert report.sent.get("ring", 0) == 2 * (plan.ring - 1) * per_block


@pytest.mark.parametrize("workers", [2])
@pytest.mark.parametrize("kind", ["1.5", "1.5-i2v"])
@pytest.mark.parametrize("size", [(6, 10), (7, 9)])
def test_a_forward_of_1_5_equals_comfyuis_own_model(
    run: Runner, files: dict[str, Path], kind: str, size: tuple[int, int], workers: int
) -> None:
    channels = 32 if "i2v" in kind else 16
    x = draw(2, channels, 4, *size, seed=1)
    inputs = {"timestep": torch.tensor([999.0, 20.0]), "context": draw(2, 7, TEXT_WIDTH, seed=2)}
    extra = {"ofs": torch.full((2,), 2.0)} if "i2v" in kind else {}
    expected = comfyui_model(files[kind])(x, **inputs, **extra)
    tensors = {"x": x[:, :16], **inputs, **extra} | ({"concat": x[:, 16:]} if "i2v" in kind else {})
    result = run.forward("cogvideox", files[kind], [tensors], cpu_plan(ulysses=workers))
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
