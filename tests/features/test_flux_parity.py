"""A parallel denoise gives the same picture as ComfyUI's own KSampler on the same file in the same server.

Tests are in order of the workers' devices, because each change of devices starts new workers.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor

from scripts.comfyui import ComfyUI
from tests.support.faulty import workers_among
from tests.support.graphs.flux import Graph, insert_after, insert_after_model, ksampler_graph, node, parallel
from tests.support.latents import relative_error, saved_latent
from tests.support.sampler_names import LOCAL
from tests.support.selection import product, thorough
from tests.support.server import TEXT_LENGTHS
from tests.support.tiny.flux import save_conditioning, save_flux

TOLERANCE = 1e-5
DIFFERENT = 1e-2
"""Smallest relative error between two results that should differ: far above any numerical noise."""


class Plan(NamedTuple):
    """The degrees of a plan on as many CPU workers."""

    ulysses: int
    ring: int = 1

    def __str__(self) -> str:
        return f"ulysses{self.ulysses}-ring{self.ring}"

    def __call__(self, graph: Graph, *, sampler: bool = True) -> Graph:
        """Return the graph on this plan's workers, with Parallel Sampler unless `sampler` is false."""
        devices = f"cpu:{self.ulysses * self.ring}"
        return parallel(graph, devices, sampler=sampler, ulysses=self.ulysses, ring=self.ring)


ULYSSES_2, RING_2 = Plan(2), Plan(1, 2)
TWO_WORKERS = (ULYSSES_2, RING_2)

LatentOf = Callable[[Graph], Tensor]
Error = Callable[[Graph, Plan], float]


@pytest.fixture
def error(latent_of: LatentOf) -> Error:
    """Provide a function that runs a graph without and with a plan and returns the relative L2 error of the plan's latent."""
    return lambda graph, plan: relative_error(latent_of(plan(graph)), latent_of(graph))


@pytest.fixture(scope="module", autouse=True)
def _files(comfyui: ComfyUI) -> None:
    """Save the files that only this module's tests use."""
    models = comfyui.base_dir / "models" / "diffusion_models"
    save_flux(models / "tiny-8-heads.safetensors", heads=8, single_blocks=1, seed=3)
    save_flux(models / "tiny-fp16.safetensors", dtype=torch.float16)
    save_flux(models / "tiny-bf16.safetensors", dtype=torch.bfloat16)
    save_flux(models / "tiny-prefix.safetensors", prefix="model.diffusion_model.")
    save_flux(models / "tiny-norm-weight.safetensors", norm_scale="weight")
    save_conditioning(comfyui.input_dir / "cond-37-batch-2.safetensors", 37, batch=2, seed=2)
    prompt = load_file(comfyui.input_dir / "cond-37.safetensors")
    save_file({"cond": prompt["cond"]}, comfyui.input_dir / "cond-37-no-pooled.safetensors")
    generator = torch.Generator().manual_seed(5)
    for batch in (1, 2):
        latent = {"latent_tensor": torch.randn(batch, 16, 13, 9, generator=generator)}
        save_file(latent | {"latent_format_version_0": torch.tensor([])}, comfyui.input_dir / f"random-{batch}.latent")
    for name in "ab":
        grey = torch.randint(0, 256, (5, 4), generator=generator, dtype=torch.uint8).numpy()
        Image.fromarray(grey).resize((72, 104), Image.Resampling.NEAREST).save(comfyui.input_dir / f"mask-{name}.png")


def odd(model: str = "tiny-schnell", **settings: Any) -> Graph:
    """Return a graph of two steps of 88x136 pixels, an odd latent of 11x17, with 37 text tokens by default."""
    return ksampler_graph(model, width=88, height=136, **{"steps": 2} | settings)


def small(model: str = "tiny-schnell", **settings: Any) -> Graph:
    """Return a graph of 72x104 pixels, an odd latent of 9x13."""
    return ksampler_graph(model, width=72, height=104, **settings)


def guided(graph: Graph, guidance: float | None) -> Graph:
    """Insert FluxGuidance after the positive prompt, or FluxDisableGuidance if `guidance` is None."""
    if guidance is None:
        return insert_after(graph, "positive", "FluxDisableGuidance", "conditioning")
    return insert_after(graph, "positive", "FluxGuidance", "conditioning", guidance=guidance)


def image_to_image(batch: int = 1, denoise: float = 0.6, **settings: Any) -> Graph:
    """Return a small graph that denoises a random latent."""
    return small(denoise=denoise, **settings) | {"latent": node("LoadLatent", latent=f"random-{batch}.latent")}


def masked(graph: Graph) -> Graph:
    """Add a mask with regions of 0, 0.5 and 1."""
    graph = insert_after(graph, "latent", "SetLatentNoiseMask", "samples", mask=["mask", 0])
    add = {"y": 0, "operation": "add"}
    return graph | {
        "nothing": node("SolidMask", value=0.0, width=72, height=104),
        "part": node("SolidMask", value=0.5, width=36, height=64),
        "half": node("MaskComposite", destination=["nothing", 0], source=["part", 0], x=32, **add),
        "mask": node("MaskComposite", destination=["half", 0], source=["part", 0], x=56, **add),
    }


def masked_by_image(graph: Graph) -> Graph:
    """Add a mask of random greys."""
    graph = insert_after(graph, "latent", "SetLatentNoiseMask", "samples", mask=["mask", 0])
    return graph | {"mask": node("LoadImageMask", image="mask-a.png", channel="red")}


def masked_one_by_one(graph: Graph) -> Graph:
    """Add a batch of two different masks, one for each of two images."""
    graph = insert_after(graph, "latent", "SetLatentNoiseMask", "samples", mask=["mask", 0])
    return graph | {
        "image a": node("LoadImage", image="mask-a.png"),
        "image b": node("LoadImage", image="mask-b.png"),
        "images": node("ImageBatch", image1=["image a", 0], image2=["image b", 0]),
        "mask": node("ImageToMask", image=["images", 0], channel="red"),
    }


JOBS: dict[str, Graph] = {
    "texts-of-37-and-256": odd(negative="cond-256", cfg=2.0),
    "dev-batch-2": guided(odd("tiny-dev", batch=2), 1.5),
    "one-image-token-one-text-token": ksampler_graph("tiny-schnell", positive="cond-1", width=16, height=16, steps=2),
    "520x264-text-of-512": ksampler_graph("tiny-schnell", positive="cond-512", width=520, height=264, steps=2),
    "sde-mask-batch-2": masked(image_to_image(batch=2, sampler="dpmpp_2m_sde", scheduler="beta", steps=5)),
}
"""The jobs that every number of workers must compute exactly."""


# -- checks of the oracle itself


def test_another_seed_gives_another_picture(latent_of):
    assert relative_error(latent_of(ULYSSES_2(odd(seed=8))), latent_of(odd(seed=7))) > DIFFERENT


def test_the_negative_changes_the_latent_at_cfg_2(latent_of):
    graph, other = odd(cfg=2.0), odd(cfg=2.0, negative="cond-256")
    assert relative_error(latent_of(ULYSSES_2(other)), latent_of(graph)) > DIFFERENT
    assert relative_error(latent_of(ULYSSES_2(odd(cfg=1.0))), latent_of(graph)) > DIFFERENT


def test_guidance_changes_the_latent_on_dev(latent_of):
    graph = odd("tiny-dev")
    for guidance in (1.5, None):
        assert relative_error(latent_of(ULYSSES_2(guided(graph, guidance))), latent_of(graph)) > DIFFERENT


def test_the_mask_changes_the_latent(latent_of):
    plain = image_to_image(denoise=1.0)
    for mask in (masked, masked_by_image):
        assert relative_error(latent_of(ULYSSES_2(mask(plain))), latent_of(plain)) > DIFFERENT


# -- two workers


@product(plan=TWO_WORKERS, graph=JOBS)
def test_two_workers_give_the_stock_latent(error, graph, plan):
    assert error(graph, plan) <= TOLERANCE


@pytest.mark.parametrize("cfg", [1.0, 2.0])
@pytest.mark.parametrize(("model", "plan"), [("tiny-schnell", RING_2), ("tiny-dev", ULYSSES_2)], ids=str)
def test_the_stock_ksampler_runs_in_the_workers_too(comfyui, latent_of, model, plan, cfg):
    graph, before = ksampler_graph(model, cfg=cfg), len(comfyui.log)
    assert relative_error(latent_of(plan(graph, sampler=False)), latent_of(graph)) <= TOLERANCE
    assert "Parallel: euler in the workers" in comfyui.log[before:]


@pytest.mark.parametrize(("guidance", "plan"), [(1.0, RING_2), (7.5, ULYSSES_2), (None, RING_2)], ids=str)
def test_flux_guidance_gives_the_stock_latent(error, guidance, plan):
    assert error(guided(small("tiny-dev", cfg=2.0), guidance), plan) <= TOLERANCE


def test_a_dev_model_without_flux_guidance_gives_the_stock_latent(error):
    assert error(small("tiny-dev"), ULYSSES_2) <= TOLERANCE


def test_a_prompt_without_pooled_output_gives_the_stock_latent(error):
    assert error(small(positive="cond-37-no-pooled"), RING_2) <= TOLERANCE


@pytest.mark.parametrize("plan", TWO_WORKERS, ids=str)
def test_three_heads_over_two_workers_give_the_stock_latent(error, plan):
    assert error(odd("tiny-3-heads", cfg=2.0), plan) <= TOLERANCE


@product(plan=TWO_WORKERS, size=[(128, 128), (136, 200), (200, 136), (16, 136), (16, 16)])
def test_all_sizes_give_the_stock_latent(error, size, plan):
    width, height = size
    assert error(ksampler_graph("tiny-schnell", width=width, height=height, cfg=2.0, steps=2), plan) <= TOLERANCE


@product(plan=TWO_WORKERS, tokens=TEXT_LENGTHS)
def test_all_text_lengths_give_the_stock_latent(error, tokens, plan):
    assert error(odd(positive=f"cond-{tokens}"), plan) <= TOLERANCE


@product(plan=TWO_WORKERS, lengths=[(37, 300), (512, 1), (1, 256)])
def test_positive_and_negative_of_different_lengths_give_the_stock_latent(error, lengths, plan):
    positive, negative = lengths
    graph = odd(positive=f"cond-{positive}", negative=f"cond-{negative}", cfg=2.0)
    assert error(graph, plan) <= TOLERANCE


# -- samplers and schedulers

USUAL_SAMPLERS = [
    "euler",
    "euler_ancestral",
    "heun",
    "dpm_2",
    "dpmpp_2m",
    "dpmpp_2m_sde",
    "dpmpp_3m_sde",
    "ddim",
    "lcm",
]
USUAL_SAMPLERS += ["deis", "ipndm", "res_multistep"]


@product(setting=[("simple", 1.0, ULYSSES_2), ("beta", 2.0, RING_2)], sampler=USUAL_SAMPLERS[:8:2])
def test_usual_samplers_give_the_stock_latent(error, sampler, setting):
    check_sampler(error, sampler, *setting)


@thorough  # tests/denoise/test_samplers.py compares each sampler with ComfyUI's, call by call
@product(
    setting=[("simple", 1.0, ULYSSES_2), ("beta", 2.0, RING_2)],
    sampler=[*USUAL_SAMPLERS[1:8:2], *USUAL_SAMPLERS[8:]],
)
def test_more_of_the_usual_samplers_give_the_stock_latent(error, sampler, setting):
    check_sampler(error, sampler, *setting)


def check_sampler(error, sampler, scheduler, cfg, plan):
    assert error(small(sampler=sampler, scheduler=scheduler, cfg=cfg), plan) <= TOLERANCE


@thorough
@pytest.mark.parametrize("sampler", sorted({*LOCAL} - {*USUAL_SAMPLERS}))
def test_further_samplers_give_the_stock_latent(error, sampler):
    assert error(small(sampler=sampler, scheduler="normal"), ULYSSES_2) <= TOLERANCE


@pytest.mark.parametrize("sampler", ["dpm_2", pytest.param("dpmpp_2m_sde", marks=thorough)])
@pytest.mark.parametrize(  # ComfyUI computes the sigmas
    "scheduler",
    [
        "karras",
        *(pytest.param(s, marks=thorough) for s in ("sgm_uniform", "exponential", "ddim_uniform", "kl_optimal")),
    ],
)
def test_further_schedulers_give_the_stock_latent(error, sampler, scheduler):
    assert error(small(sampler=sampler, scheduler=scheduler), ULYSSES_2) <= TOLERANCE


def test_every_supported_sampler_is_one_of_ksamplers(comfyui):
    (known, *_) = comfyui.object_info("KSampler")["input"]["required"]["sampler_name"]
    assert set(known) >= {*LOCAL, *USUAL_SAMPLERS}


def test_the_largest_seed_gives_the_stock_latent(error):
    assert error(small(seed=2**64 - 1, steps=2), ULYSSES_2) <= TOLERANCE


# -- latents: img2img, batches, masks

LATENTS: dict[str, Graph] = {
    "denoise-0.6": image_to_image(),
    "denoise-0.6-sde": image_to_image(sampler="dpmpp_2m_sde", cfg=2.0),
    "denoise-0.6-batch-2": image_to_image(batch=2, cfg=2.0),
    "batch-2": small(batch=2, cfg=2.0),
    "batch-3-ancestral": small(batch=3, sampler="euler_ancestral"),
    "batch-3-prompt-of-batch-2": small(batch=3, positive="cond-37-batch-2", cfg=2.0),
    "mask": masked(image_to_image(denoise=1.0)),
    "mask-of-an-image": masked_by_image(image_to_image(denoise=0.8)),
    "mask-empty-latent": masked_by_image(small(cfg=2.0)),
    "mask-ddim": masked(image_to_image(denoise=1.0, sampler="ddim")),
    "mask-ddim-batch-2": masked_by_image(image_to_image(batch=2, sampler="ddim", scheduler="normal")),
    "mask-batch-2": masked(image_to_image(batch=2)),
    "mask-each-batch-2": masked_one_by_one(image_to_image(batch=2, cfg=2.0)),
    "mask-heun": masked(image_to_image(sampler="heun", cfg=2.0)),
    "mask-lcm": masked(image_to_image(sampler="lcm", scheduler="sgm_uniform")),
}


THOROUGH_LATENTS = ("denoise-0.6", "batch-2", "mask", "mask-ddim", "mask-batch-2", "mask-heun")
"""The latents whose features the other latents mostly cover too."""


@pytest.mark.parametrize(
    "graph",
    [pytest.param(graph, id=name, marks=[thorough] * (name in THOROUGH_LATENTS)) for name, graph in LATENTS.items()],
)
def test_latents_batches_and_masks_give_the_stock_latent(error, graph):
    assert error(graph, ULYSSES_2) <= TOLERANCE


# -- files and precisions


@pytest.mark.parametrize("model", ["tiny-fp16", "tiny-bf16", "tiny-prefix", "tiny-norm-weight"])
def test_files_of_other_dtypes_and_names_give_the_stock_latent(error, model):
    assert error(small(model), ULYSSES_2) <= TOLERANCE


@pytest.mark.parametrize(
    ("model", "weight_dtype"), [("tiny-schnell", "fp8_e4m3fn"), ("tiny-dev", "fp8_e4m3fn"), ("tiny-bf16", "fp8_e5m2")]
)
def test_weights_kept_in_fp8_give_the_stock_latent(latent_of, error, model, weight_dtype):
    graph, exact = small(model), small(model)
    graph["model"]["inputs"]["weight_dtype"] = weight_dtype
    assert error(graph, ULYSSES_2) <= TOLERANCE
    assert relative_error(latent_of(graph), latent_of(exact)) > DIFFERENT


def check_precision(latent_of: LatentOf, model: str, dtype: str, plan: Plan) -> None:
    """Assert that a lower precision loses at most 1.5 times as much on workers as in ComfyUI."""
    exact = odd(model, cfg=2.0)
    rounded = insert_after_model(exact, "ModelComputeDtype", dtype=dtype)
    ours = relative_error(latent_of(plan(rounded)), latent_of(exact))
    comfys = relative_error(latent_of(rounded), latent_of(exact))
    assert comfys > TOLERANCE, "the reference did not run in the lower precision"
    assert ours > TOLERANCE, "the workers did not run in the lower precision"
    assert ours <= 1.5 * comfys


PRECISIONS = ("bf16", "fp16")


@product(setting=[("tiny-schnell", RING_2), ("tiny-dev", ULYSSES_2)], dtype=PRECISIONS)
def test_bf16_and_fp16_on_two_workers_are_as_precise_as_comfyui(latent_of, setting, dtype):
    model, plan = setting
    check_precision(latent_of, model, dtype, plan)


# -- a trained model

COLOURS = {
    "red": (255, 0, 0),
    "white": (255, 255, 255),
    "blue": (0, 0, 255),
    "yellow": (255, 255, 0),
    "green": (0, 160, 0),
    "black": (0, 0, 0),
    "purple": (128, 0, 160),
    "orange": (255, 140, 0),
}


def colour_at(picture: Image.Image, x: int, y: int) -> str:
    """Return the name of the colour nearest to a pixel."""
    pixel = torch.tensor(picture.convert("RGB").getpixel((x, y)), dtype=torch.float32)
    return min(COLOURS, key=lambda name: (pixel - torch.tensor(COLOURS[name])).norm().item())


def with_picture(graph: Graph) -> Graph:
    """Return the graph with its latent decoded and saved as a picture by the node "picture"."""
    return graph | {
        "vae": node("VAELoader", vae_name="taef1"),
        "decode": node("VAEDecode", samples=["sampler", 0], vae=["vae", 0]),
        "picture": node("SaveImage", images=["decode", 0], filename_prefix="sprite"),
    }


@pytest.mark.parametrize(
    "caption",
    [
        "red-circle-on-white",
        pytest.param("blue-square-on-yellow", marks=thorough),
        pytest.param("purple-diamond-on-green", marks=thorough),
        pytest.param("white-cross-on-red", marks=thorough),
    ],
)
def test_sprites_are_drawn_as_captioned(comfyui, latent_of, caption):
    graph = ksampler_graph("sprites-flux-schnell", positive=caption, negative="empty", cfg=2.0, steps=20)
    run = comfyui.queue(ULYSSES_2(with_picture(graph))).check()
    assert relative_error(saved_latent(comfyui, run), latent_of(graph)) <= TOLERANCE
    (file,) = comfyui.files(run, "picture")
    picture = Image.open(file)
    colour, _, _, background = caption.split("-")
    assert picture.size == (128, 128)
    assert {colour_at(picture, x, y) for x in (60, 67) for y in (60, 67)} == {colour}
    assert {colour_at(picture, x, y) for x in (4, 123) for y in (4, 123)} == {background}


# -- workers stay between runs


def test_another_size_and_text_and_split_need_no_new_workers_and_no_loading(comfyui, latent_of):
    first = odd("tiny-schnell", seed=21)
    second = ksampler_graph("tiny-schnell", positive="cond-300", width=200, height=72, seed=22, steps=2)
    latent_of(ULYSSES_2(first))
    processes, before = {process.pid for process in comfyui.children()}, len(comfyui.log)
    assert len(workers_among(comfyui.children())) == 2
    result = latent_of(RING_2(second))
    log = comfyui.log[before:]
    assert {process.pid for process in comfyui.children()} == processes
    assert "Parallel: starting" not in log
    assert re.search(r"peak +read +sent\n(.* 0\.0 MiB {2}\S.*\n){2}", log), log
    assert relative_error(result, latent_of(second)) <= TOLERANCE


# -- three workers

lengths = pytest.mark.parametrize(
    "tokens", [*TEXT_LENGTHS[:2], *(pytest.param(t, marks=thorough) for t in TEXT_LENGTHS[2:])]
)
"""Text lengths for splits over more than two workers; tests/attention tests any tokens and heads under any split."""

of_more_workers = pytest.mark.parametrize(
    "graph",
    [
        pytest.param(graph, id=name, marks=[thorough] * (name not in ("texts-of-37-and-256", "sde-mask-batch-2")))
        for name, graph in JOBS.items()
    ],
)
"""The jobs for splits over more than two workers."""


@of_more_workers
@pytest.mark.parametrize("plan", [pytest.param(Plan(3), marks=thorough), Plan(1, 3)], ids=str)
def test_three_workers_give_the_stock_latent(error, graph, plan):
    assert error(graph, plan) <= TOLERANCE


@lengths
def test_four_heads_over_three_workers_give_the_stock_latent_for_all_text_lengths(error, tokens):
    assert error(odd(positive=f"cond-{tokens}"), Plan(3)) <= TOLERANCE


def test_one_head_for_each_of_three_workers_gives_the_stock_latent(error):
    assert error(odd("tiny-3-heads"), Plan(3)) <= TOLERANCE


# -- four workers


@of_more_workers
@pytest.mark.parametrize(
    "plan", [pytest.param(Plan(4), marks=thorough), pytest.param(Plan(1, 4), marks=thorough), Plan(2, 2)], ids=str
)
def test_four_workers_give_the_stock_latent(error, graph, plan):
    assert error(graph, plan) <= TOLERANCE


@lengths
def test_ulysses_times_ring_gives_the_stock_latent_for_all_text_lengths(error, tokens):
    assert error(odd(positive=f"cond-{tokens}"), Plan(2, 2)) <= TOLERANCE


def test_three_heads_over_ulysses_2_times_ring_2_give_the_stock_latent(error):
    assert error(odd("tiny-3-heads", cfg=2.0), Plan(2, 2)) <= TOLERANCE


@thorough
@product(plan=[Plan(4), Plan(2, 2)], dtype=PRECISIONS)
def test_bf16_and_fp16_on_four_workers_are_as_precise_as_comfyui(latent_of, dtype, plan):
    check_precision(latent_of, "tiny-schnell", dtype, plan)


# -- eight workers; in the quick run tests/engine and tests/attention test them


@thorough
@product(plan=[Plan(1, 8), Plan(2, 4), Plan(4, 2)], job=["texts-of-37-and-256", "one-image-token-one-text-token"])
def test_eight_workers_give_the_stock_latent(error, job, plan):
    assert error(JOBS[job], plan) <= TOLERANCE


@thorough
@pytest.mark.parametrize("job", ["520x264-text-of-512", "sde-mask-batch-2"])
def test_further_jobs_on_eight_workers_give_the_stock_latent(error, job):
    assert error(JOBS[job], Plan(4, 2)) <= TOLERANCE


@thorough
def test_one_head_for_each_of_eight_workers_gives_the_stock_latent(error):
    assert error(odd("tiny-8-heads"), Plan(8)) <= TOLERANCE


# -- one worker


@of_more_workers
def test_one_worker_gives_the_stock_latent(error, graph):
    assert error(graph, Plan(1)) <= TOLERANCE


@product(model=["tiny-schnell", "tiny-dev"], dtype=PRECISIONS)
def test_bf16_and_fp16_on_one_worker_are_as_precise_as_comfyui(latent_of, model, dtype):
    check_precision(latent_of, model, dtype, Plan(1))
