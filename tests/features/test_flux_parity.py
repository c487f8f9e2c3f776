"""A parallel denoise gives the same picture as ComfyUI's own KSampler on the same file in the same server.

Tests are in order of the workers' devices, because each change of devices starts new workers. `test_every_sampler` has the
samplers, `test_files_of_flux` the kinds of files.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import pytest
from safetensors.torch import load_file, save_file

from scripts.comfyui import ComfyUI
from tests.support.faulty import workers_among
from tests.support.graphs.comfyui import save_latent
from tests.support.graphs.flux import Graph, insert_after, insert_after_model, ksampler_graph, node, parallel
from tests.support.latents import relative_error
from tests.support.selection import crossed, thorough
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


def odd(model: str, **settings: Any) -> Graph:
    """Return a graph of two steps of 88x136 pixels, an odd latent of 11x17, with 37 text tokens by default."""
    return ksampler_graph(model, width=88, height=136, **{"steps": 2} | settings)


def small(model: str = NARROW, **settings: Any) -> Graph:
    """Return a graph of two steps of 72x104 pixels, an odd latent of 9x13, on a model of two heads by default."""
    return ksampler_graph(model, width=72, height=104, **{"steps": 2} | settings)


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
    "texts-of-37-and-256": odd(NARROW, negative="cond-256", cfg=2.0),
    "dev-batch-2": insert_after(odd(NARROW_DEV, batch=2), "positive", "FluxGuidance", "conditioning", guidance=1.5),
    "one-image-token-one-text-token": ksampler_graph("tiny-schnell", positive="cond-1", width=16, height=16, steps=2),
    "520x264-text-of-512": ksampler_graph("tiny-schnell", positive="cond-512", width=520, height=264, steps=2),
    "sde-mask-batch-2": masked(
        image_to_image(model="tiny-schnell", batch=2, sampler="dpmpp_2m_sde", scheduler="beta", steps=3)
    ),
}
"""The jobs that every number of workers must compute exactly."""

PLAIN, DEV = small(), small(NARROW_DEV, cfg=2.0)

SETTINGS: dict[str, tuple[Graph, Graph, Plan]] = {
    "guidance-disabled": (insert_after(DEV, "positive", "FluxDisableGuidance", "conditioning"), DEV, RING_2),
    "no-pooled-output": (small(positive="cond-37-no-pooled"), PLAIN, RING_2),
    "largest-seed": (small(seed=2**64 - 1), PLAIN, ULYSSES_2),
    "batch-3-prompt-of-batch-2": (
        small(batch=3, positive="cond-37-batch-2", cfg=2.0),
        small(batch=3, cfg=2.0),
        ULYSSES_2,
    ),
    "mask-ddim-batch-2": (
        masked(image_to_image(batch=2, sampler="ddim", scheduler="normal")),
        image_to_image(batch=2, sampler="ddim", scheduler="normal"),
        ULYSSES_2,
    ),
    "mask-each-batch-2": (
        masked_one_by_one(image_to_image(batch=2, cfg=2.0)),
        image_to_image(batch=2, cfg=2.0),
        ULYSSES_2,
    ),
}
"""Settings of a denoise on two workers, each with a graph without the setting, and the plan.

Other settings are in the jobs below: texts, sizes, guidance, a random sampler. test_every_sampler has samplers and schedulers.
"""


@pytest.mark.parametrize(("graph", "plain", "plan"), SETTINGS.values(), ids=SETTINGS)
def test_a_setting_gives_the_stock_latent_and_changes_it(latent_of, assert_equal_latents, graph, plain, plan):
    assert_equal_latents(plan(graph), graph)
    assert relative_error(latent_of(graph), latent_of(plain)) > DIFFERENT


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


PLANS = {
    str(plan): plan
    for plan in (
        ULYSSES_2,
        RING_2,
        Plan(3),
        Plan(1, 3),
        Plan(4),
        Plan(1, 4),
        Plan(2, 2),
        Plan(1),
        Plan(1, 8),
        Plan(4, 2),
    )
}
QUICK_JOBS = {
    "ulysses1-ring2": "texts-of-37-and-256",
    "ulysses4-ring1": "one-image-token-one-text-token",
    "ulysses2-ring2": "sde-mask-batch-2",
    "ulysses1-ring1": "dev-batch-2",
}
"""The job of each plan in the quick run, where engine and attention have longer rings, and texts of any length.

Two workers have the settings above.
"""


@pytest.mark.parametrize(("plan", "graph"), [*crossed(PLANS, JOBS, QUICK_JOBS)])
def test_every_job_gives_the_stock_latent_on_any_number_of_workers(assert_equal_latents, graph, plan):
    assert_equal_latents(plan(graph), graph)


@pytest.mark.parametrize(
    ("model", "dtype", "plan"),
    [
        (NARROW_DEV, "fp16", Plan(1)),
        (NARROW, "bf16", RING_2),
        pytest.param("tiny-dev", "bf16", ULYSSES_2, marks=thorough),
        pytest.param("tiny-schnell", "fp16", Plan(2, 2), marks=thorough),
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
