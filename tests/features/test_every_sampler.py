"""KSampler's whole list of samplers on FLUX.1 and Wan, by Parallel Sampler, which takes the workers' loop or refuses."""

from __future__ import annotations

from typing import Any

import pytest

from scripts.comfyui import ComfyUI
from tests.features.conftest import EqualLatents
from tests.support.comfyuis import tell_new
from tests.support.graphs.comfyui import TOLERANCE, LatentOf, graph_of, save_families, spread
from tests.support.graphs.diffusers import refused
from tests.support.graphs.flux import Graph, insert_after_model, ksampler_graph, parallel, ways
from tests.support.latents import relative_error
from tests.support.sampler_names import LOCAL, NOT_LOCAL
from tests.support.selection import pairwise, thorough
from tests.support.server import NARROW

PLANS: dict[str, dict[str, Any]] = {
    "ulysses2": {"devices": "cpu:2", "cfg": 1, "ulysses": 2, "ring": 1},
    "cfg2": {"devices": "cpu:2", "cfg": 2, "ulysses": 1, "ring": 1},
    "ring2-sharded": {"devices": "cpu:2", "cfg": 1, "ulysses": 1, "ring": 2, "weights": "sharded"},
    "pipefusion2": {"devices": "cpu:2", "cfg": 1, "pipefusion": 2, "patches": 2, "warmup_steps": 99},
}
SCHEDULERS = ("simple", "beta", "karras", "normal")
SIZE = {"width": 40, "height": 56}
"""The picture's size for FLUX.1; a sampler depends neither on the size nor on the model's width."""


@pytest.fixture(scope="module", autouse=True)
def _files(comfyui: ComfyUI) -> None:
    save_families(comfyui, "wan")


def job(model: str, plan: str, **settings: Any) -> tuple[Graph, Graph]:
    """Return a graph on workers, and the stock graph."""
    if model == "wan":
        graph = graph_of(model, **{"steps": 4, **settings})
        return spread(graph, **PLANS[plan]), graph
    names = {"sampler_name": "sampler"}
    given = {names.get(name, name): value for name, value in settings.items()}
    graph = ksampler_graph(NARROW, **SIZE, **{"cfg": 2.0, **given})
    return parallel(graph, sampler=True, **PLANS[plan]), graph


@pytest.mark.parametrize(
    ("sampler", "scheduler", "model", "plan"),
    [
        ("uni_pc", "karras", "flux1", "ring2-sharded"),
        ("dpm_fast", "normal", "wan", "pipefusion2"),
        ("euler_ancestral_cfg_pp", "beta", "wan", "cfg2"),
    ],
)
def test_samplers_of_the_quick_run_give_the_stock_latent(
    assert_equal_latents: EqualLatents, sampler: str, scheduler: str, model: str, plan: str
) -> None:
    assert_equal_latents(*job(model, plan, sampler_name=sampler, scheduler=scheduler))


@thorough  # tests/denoise/test_samplers.py compares each with ComfyUI's, call by call, on the whole picture and in patches
@pairwise(sampler=LOCAL, scheduler=SCHEDULERS, model=("flux1", "wan"), plan=(*PLANS,))
def test_all_samplers_give_the_stock_latent(
    assert_equal_latents: EqualLatents, sampler: str, scheduler: str, model: str, plan: str
) -> None:
    assert_equal_latents(*job(model, plan, sampler_name=sampler, scheduler=scheduler))


def test_all_samplers_of_comfyuis_list_are_known(comfyui: ComfyUI) -> None:
    for kind in ("KSampler", "ParallelSampler"):
        (known, *more) = comfyui.object_info(kind)["input"]["required"]["sampler_name"]
        listed = known if isinstance(known, list) else more[0]["options"]
        names = {name for name in listed if not name.startswith("cogvideox")}
        assert names >= {*LOCAL, *NOT_LOCAL}
        tell_new("samplers", names - {*LOCAL, *NOT_LOCAL})


BATCH = {"devices": "cpu:2", "data": 2, "cfg": 1, "ulysses": 1, "ring": 1}


@pytest.mark.parametrize("sampler", ["sa_solver", pytest.param("euler_cfg_pp", marks=thorough)])
def test_a_batch_over_data_ranks_gives_the_stock_latent(assert_equal_latents: EqualLatents, sampler: str) -> None:
    """The noise that a sampler draws and the negative prediction that it reads are those of the whole batch."""
    graph = ksampler_graph(NARROW, **SIZE, batch=3, cfg=2.0, sampler=sampler)
    assert_equal_latents(parallel(graph, sampler=True, **BATCH), graph)


def test_cfg_pp_uses_the_negative_at_cfg_1(assert_equal_latents: EqualLatents) -> None:
    assert_equal_latents(*job("flux1", "cfg2", sampler_name="dpmpp_2m_cfg_pp", cfg=1.0))


def test_parallel_sampler_refuses_a_sampler_that_reads_the_latent(comfyui: ComfyUI) -> None:
    graph = ksampler_graph(NARROW, **SIZE, cfg=1.0, sampler="dpm_adaptive")
    assert refused(comfyui, parallel(graph, sampler=True, **PLANS["ulysses2"])) == (
        "Parallel Sampler does not support the sampler dpm_adaptive, which takes a norm of the latent: choose another sampler, "
        "such as euler or dpmpp_2m, or KSampler, which is slower (one model call at a time)."
    )


def test_cfg_pp_in_patches_equals_one_workers_patches(latent_of: LatentOf) -> None:
    """Each patch's sampler receives both branches; with two workers for the branches, from both workers."""
    graph = ksampler_graph(NARROW, **SIZE, steps=3, cfg=2.0, sampler="euler_cfg_pp")
    stale = {"patches": 3, "warmup_steps": 1, "ulysses": 1, "ring": 1}
    one = parallel(graph, sampler=True, devices="cpu", pipefusion=1, cfg=1, **stale)
    several = parallel(graph, sampler=True, devices="cpu:2", pipefusion=1, cfg=2, **stale)
    assert relative_error(latent_of(several), latent_of(one)) <= TOLERANCE
    assert TOLERANCE < relative_error(latent_of(one), latent_of(graph)) < 1


def test_guidance_that_needs_the_whole_picture_runs_one_call_at_a_time_with_pipefusion(
    assert_equal_latents: EqualLatents,
) -> None:
    graph = insert_after_model(ksampler_graph(NARROW, **SIZE, cfg=2.0), "CFGNorm", strength=1.0)
    log = assert_equal_latents(parallel(graph, devices="cpu:2", pipefusion=2, cfg=1, warmup_steps=99), graph)
    assert ways(log) == ["CFGNorm with PipeFusion"]
