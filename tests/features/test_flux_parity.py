"""A parallel denoise gives the same picture as ComfyUI's own KSampler on the same file in the same server.

Tests are in order of the workers' devices, because each change of devices starts new workers. `test_every_sampler` has the
samplers, `test_files_of_flux` the kinds of files.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import product as cartesian
from typing import Any, NamedTuple

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from scripts.comfyui import ComfyUI
from tests.support.faulty import workers_among
from tests.support.graphs.comfyui import LatentOf, save_latent
from tests.support.graphs.flux import Graph, insert_after, insert_after_model, ksampler_graph, node, parallel
from tests.support.latents import relative_error, saved_latent
from tests.support.selection import product, thorough
from tests.support.server import NARROW, NARROW_DEV, save_picture
from tests.support.tiny.flux import save_conditioning

TOLERANCE = 1e-5
DIFFERENT = 1e-2
"""Smallest relative error between two results that should differ: far above any numerical noise."""


class Plan(NamedTuple):
    """The degrees of a plan on as many CPU workers."""

    ulysses: int
    ring: int = 1

    def __str__(self) -> str:
        return f"ulysses{self.ulysses}-ring{self.ring}"

    def __call__(self, graph: Graph) -> Graph:
        """Return the graph with Parallel Sampler on this plan's workers."""
        devices = f"cpu:{self.ulysses * self.ring}"
        return parallel(graph, devices, sampler=True, ulysses=self.ulysses, ring=self.ring)


ULYSSES_2, RING_2 = Plan(2), Plan(1, 2)

Error = Callable[[Graph, Plan], float]


@pytest.fixture
def error(latent_of: LatentOf) -> Error:
    """Provide a function that runs a graph without and with a plan and returns the relative L2 error of the plan's latent."""
    return lambda graph, plan: relative_error(latent_of(plan(graph)), latent_of(graph))


@pytest.fixture(scope="module", autouse=True)
def _files(comfyui: ComfyUI) -> None:
    """Save the files that only this module's tests use."""
    save_conditioning(comfyui.input_dir / "cond-37-batch-2.safetensors", 37, batch=2, seed=2)
    prompt = load_file(comfyui.input_dir / "cond-37.safetensors")
    save_file({"cond": prompt["cond"]}, comfyui.input_dir / "cond-37-no-pooled.safetensors")
    for batch in (1, 2):
        save_latent(comfyui, f"random-{batch}", batch, 16, 13, 9)
    for seed, name in enumerate("ab"):
        save_picture(comfyui, f"mask-{name}.png", (72, 104), (5, 4), seed)


def odd(model: str = "tiny-schnell", **settings: Any) -> Graph:
    """Return a graph of two steps of 88x136 pixels, an odd latent of 11x17, with 37 text tokens by default."""
    return ksampler_graph(model, width=88, height=136, **{"steps": 2} | settings)


def small(model: str = NARROW, **settings: Any) -> Graph:
    """Return a graph of two steps of 72x104 pixels, an odd latent of 9x13, on a model of two heads by default."""
    return ksampler_graph(model, width=72, height=104, **{"steps": 2} | settings)


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
    """Add a mask of random values."""
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
    "sde-mask-batch-2": masked(
        image_to_image(model="tiny-schnell", batch=2, sampler="dpmpp_2m_sde", scheduler="beta", steps=3)
    ),
}
"""The jobs that every number of workers must compute exactly."""

PLANS = [ULYSSES_2, RING_2, Plan(3), Plan(1, 3), Plan(4), Plan(1, 4), Plan(2, 2), Plan(1)]
EIGHT = [Plan(1, 8), Plan(2, 4), Plan(4, 2)]


def shaped(size: tuple[int, int], texts: tuple[int, int], model: str = NARROW) -> Graph:
    """Return a graph of a width and a height, with positive and negative prompts of these token counts."""
    positive, negative = (f"cond-{tokens}" for tokens in texts)
    width, height = size
    return ksampler_graph(model, positive=positive, negative=negative, width=width, height=height, cfg=2.0, steps=2)


DEV = small(NARROW_DEV, cfg=2.0)

SETTINGS: dict[str, tuple[Graph, Plan]] = {
    "guidance-1": (guided(DEV, 1.0), RING_2),
    "guidance-7.5": (guided(DEV, 7.5), ULYSSES_2),
    "guidance-disabled": (guided(DEV, None), RING_2),
    "guidance-by-default": (small(NARROW_DEV), ULYSSES_2),
    "no-pooled-output": (small(positive="cond-37-no-pooled"), RING_2),
    "largest-seed": (small(seed=2**64 - 1), ULYSSES_2),
    "128x128-texts-of-37-and-300": (shaped((128, 128), (37, 300)), RING_2),
    "136x200-texts-of-512-and-1": (shaped((136, 200), (512, 1)), ULYSSES_2),
    "200x136-texts-of-1-and-256-three-heads": (shaped((200, 136), (1, 256), "tiny-3-heads"), ULYSSES_2),
    "16x136-texts-of-256-and-37": (shaped((16, 136), (256, 37)), RING_2),
    "16x16-texts-of-300-and-512": (shaped((16, 16), (300, 512)), ULYSSES_2),
    "exponential": (small(sampler="dpmpp_2m_sde", scheduler="exponential"), ULYSSES_2),
    "ddim-uniform": (small(sampler="dpmpp_2m_sde", scheduler="ddim_uniform"), ULYSSES_2),
    "kl-optimal": (small(sampler="dpmpp_2m_sde", scheduler="kl_optimal"), ULYSSES_2),
    "denoise-0.6-sde": (image_to_image(sampler="dpmpp_2m_sde", cfg=2.0), ULYSSES_2),
    "denoise-0.6-batch-2": (image_to_image(batch=2, cfg=2.0), ULYSSES_2),
    "batch-3-ancestral": (small(batch=3, sampler="euler_ancestral"), ULYSSES_2),
    "batch-3-prompt-of-batch-2": (small(batch=3, positive="cond-37-batch-2", cfg=2.0), ULYSSES_2),
    "mask": (masked(image_to_image(denoise=1.0)), ULYSSES_2),
    "mask-of-an-image": (masked_by_image(image_to_image(denoise=0.8)), ULYSSES_2),
    "mask-empty-latent": (masked_by_image(small(cfg=2.0)), ULYSSES_2),
    "mask-ddim": (masked(image_to_image(denoise=1.0, sampler="ddim")), ULYSSES_2),
    "mask-ddim-batch-2": (
        masked_by_image(image_to_image(batch=2, sampler="ddim", scheduler="normal")),
        ULYSSES_2,
    ),
    "mask-each-batch-2": (masked_one_by_one(image_to_image(batch=2, cfg=2.0)), ULYSSES_2),
    "mask-heun": (masked(image_to_image(sampler="heun", cfg=2.0)), ULYSSES_2),
    "mask-lcm": (masked(image_to_image(sampler="lcm", scheduler="sgm_uniform")), ULYSSES_2),
}
"""Settings of a denoise on two workers. Each size, token count and scheduler appears once."""

THOROUGH = {
    "guidance-1": "the job dev-batch-2 has another value of guidance",
    "guidance-7.5": "the job dev-batch-2 has another value of guidance",
    "128x128-texts-of-37-and-300": "tests/attention/test_sequence_parallel.py has any number of tokens under any split",
    "136x200-texts-of-512-and-1": "tests/attention/test_sequence_parallel.py has any number of tokens under any split",
    "16x16-texts-of-300-and-512": "the job one-image-token-one-text-token",
    "exponential": "ComfyUI computes the sigmas, and test_every_sampler has four schedulers",
    "ddim-uniform": "ComfyUI computes the sigmas, and test_every_sampler has four schedulers",
    "kl-optimal": "ComfyUI computes the sigmas, and test_every_sampler has four schedulers",
    "denoise-0.6-sde": "the job sde-mask-batch-2",
    "mask": "the job sde-mask-batch-2",
    "mask-of-an-image": "mask-ddim-batch-2",
    "mask-empty-latent": "mask-ddim-batch-2, and the job sde-mask-batch-2",
    "guidance-by-default": "test_files_of_flux's references, without a value of guidance",
    "16x136-texts-of-256-and-37": "the jobs texts-of-37-and-256 and one-image-token-one-text-token",
    "200x136-texts-of-1-and-256-three-heads": "tests/engine/test_products.py has three heads, attention any number of tokens",
    "denoise-0.6-batch-2": "the job sde-mask-batch-2",
    "batch-3-ancestral": "tests/denoise/test_shared_noise.py has the noise of a batch, batch-3-prompt-of-batch-2 its size",
    "mask-ddim": "mask-ddim-batch-2",
    "mask-heun": "mask-each-batch-2",
    "mask-lcm": "the job sde-mask-batch-2 draws noise under a mask",
}
"""The settings left to `--all`, each with its cover in the quick run."""


@pytest.mark.parametrize(
    ("graph", "changed"),
    [
        pytest.param(odd(NARROW), odd(NARROW, seed=8), id="seed"),
        pytest.param(odd(NARROW, cfg=2.0), odd(NARROW, cfg=2.0, negative="cond-256"), id="negative"),
        pytest.param(odd(NARROW, cfg=2.0), odd(NARROW, cfg=1.0), id="cfg"),
        pytest.param(odd(NARROW_DEV), guided(odd(NARROW_DEV), 1.5), id="guidance"),
        pytest.param(odd(NARROW_DEV), guided(odd(NARROW_DEV), None), id="no guidance"),
        pytest.param(image_to_image(denoise=1.0), masked(image_to_image(denoise=1.0)), id="mask"),
        pytest.param(image_to_image(denoise=1.0), masked_by_image(image_to_image(denoise=1.0)), id="mask of an image"),
    ],
)
def test_a_setting_changes_the_oracles_latent(latent_of, graph, changed):
    assert relative_error(latent_of(changed), latent_of(graph)) > DIFFERENT


@pytest.mark.parametrize(
    ("graph", "plan"),
    [pytest.param(*case, id=name, marks=[thorough] * (name in THOROUGH)) for name, case in SETTINGS.items()],
)
def test_a_setting_on_two_workers_gives_the_stock_latent(error, graph, plan):
    assert error(graph, plan) <= TOLERANCE


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


@thorough  # in the quick run the jobs have the same oracle
def test_a_sprite_is_drawn_as_captioned(comfyui, latent_of):
    caption = "red-circle-on-white"
    graph = ksampler_graph("sprites-flux-schnell", positive=caption, negative="empty", cfg=2.0, steps=20)
    run = comfyui.queue(ULYSSES_2(with_picture(graph))).check()
    assert relative_error(saved_latent(comfyui, run), latent_of(graph)) <= TOLERANCE
    (file,) = comfyui.files(run, "picture")
    picture = Image.open(file)
    assert picture.size == (128, 128)
    assert {colour_at(picture, x, y) for x in (60, 67) for y in (60, 67)} == {"red"}
    assert {colour_at(picture, x, y) for x in (4, 123) for y in (4, 123)} == {"white"}


# -- workers stay between runs


def test_another_size_and_text_and_split_need_no_new_workers_and_no_loading(comfyui, latent_of):
    first = odd(NARROW, seed=21)
    second = ksampler_graph(NARROW, positive="cond-300", width=200, height=72, seed=22, steps=2)
    latent_of(ULYSSES_2(first))
    processes, before = {process.pid for process in comfyui.children()}, len(comfyui.log)
    assert len(workers_among(comfyui.children())) == 2
    result = latent_of(RING_2(second))
    log = comfyui.log[before:]
    assert {process.pid for process in comfyui.children()} == processes
    assert "Parallel: starting" not in log
    assert re.search(r"peak +read +sent\n(.* 0\.0 MiB {2}\S.*\n){2}", log), log
    assert relative_error(result, latent_of(second)) <= TOLERANCE


# -- any number of workers


QUICK_JOBS = {
    Plan(3): "one-image-token-one-text-token",
    Plan(4): "sde-mask-batch-2",
    Plan(2, 2): "texts-of-37-and-256",
    Plan(1): "dev-batch-2",
}
"""The job of each plan in the quick run, where engine and attention have longer rings, and texts of any length.

Two workers have the settings above.
"""


@pytest.mark.parametrize(
    ("plan", "graph"),
    [
        pytest.param(plan, JOBS[name], id=f"{plan}-{name}", marks=[thorough] * (QUICK_JOBS.get(plan) != name))
        for plan, name in cartesian(PLANS, JOBS)
    ],
)
def test_every_job_gives_the_stock_latent_on_up_to_four_workers(error, graph, plan):
    assert error(graph, plan) <= TOLERANCE


@thorough  # in the quick run tests/engine and tests/attention test eight workers
@product(plan=EIGHT, graph=JOBS)
def test_every_job_gives_the_stock_latent_on_eight_workers(error, graph, plan):
    assert error(graph, plan) <= TOLERANCE


@pytest.mark.parametrize(
    ("model", "dtype", "plan"),
    [
        pytest.param(
            *(model, dtype, plan),
            marks=[thorough]
            * ((model, dtype, plan) not in (("tiny-schnell", "bf16", RING_2), ("tiny-dev", "fp16", Plan(1)))),
        )
        for model, plan in (
            ("tiny-dev", Plan(1)),
            ("tiny-schnell", Plan(1)),
            ("tiny-schnell", RING_2),
            ("tiny-dev", ULYSSES_2),
            ("tiny-schnell", Plan(4)),
            ("tiny-schnell", Plan(2, 2)),
        )
        for dtype in ("bf16", "fp16")
    ],
    ids=str,
)
def test_bf16_and_fp16_lose_at_most_one_and_a_half_times_as_much_as_in_comfyui(latent_of, model, dtype, plan):
    exact = odd(model, cfg=2.0)
    rounded = insert_after_model(exact, "ModelComputeDtype", dtype=dtype)
    ours = relative_error(latent_of(plan(rounded)), latent_of(exact))
    comfys = relative_error(latent_of(rounded), latent_of(exact))
    assert comfys > TOLERANCE, "the reference did not run in the lower precision"
    assert ours > TOLERANCE, "the workers did not run in the lower precision"
    assert ours <= 1.5 * comfys
