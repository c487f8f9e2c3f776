"""KSampler's whole list of samplers on FLUX.1 and Wan, by Parallel Sampler, which takes the workers' loop or refuses."""

from __future__ import annotations

from typing import Any

import pytest

from scripts.comfyui import ComfyUI
from tests.features.conftest import EqualLatents
from tests.support.comfyuis import tell_new
from tests.support.graphs.comfyui import TOLERANCE, LatentOf, graph_of, masked, save_families, spread
from tests.support.graphs.diffusers import refused
from tests.support.graphs.flux import Graph, insert_after_model, ksampler_graph, parallel, ways
from tests.support.latents import relative_error
from tests.support.sampler_names import LOCAL, NOT_LOCAL
from tests.support.selection import pairwise, thorough
from tests.support.server import NARROW

SPECIAL = ("euler", "dpmpp_2m_sde", "uni_pc", "dpm_fast", "sa_solver_pece", "euler_ancestral_cfg_pp")
"""Six samplers with one special trait each: noise, a path, a sigma that it writes, steps of its own, weights, both branches."""

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
    """Return the stock graph, and the same graph on workers."""
    if model == "wan":
        graph = graph_of(model, **{"steps": 4, **settings})
        return graph, spread(graph, **PLANS[plan])
    names = {"sampler_name": "sampler"}
    given = {names.get(name, name): value for name, value in settings.items()}
    graph = ksampler_graph(NARROW, **SIZE, **{"cfg": 2.0, **given})
    return graph, parallel(graph, sampler=True, **PLANS[plan])


def check(latent_of: LatentOf, stock: Graph, spread_out: Graph) -> None:
    error = relative_error(latent_of(spread_out), latent_of(stock))
    print(f"off by {error:.1e}")
    assert error <= TOLERANCE


def samplers_of(names: tuple[str, ...]) -> pytest.MarkDecorator:
    """Parametrise a test with samplers, each two of sampler, scheduler, model and plan together in a case."""
    return pairwise(sampler=names, scheduler=SCHEDULERS, model=("flux1", "wan"), plan=(*PLANS,))


@pytest.mark.parametrize(
    ("sampler", "scheduler", "model", "plan"),
    [
        ("uni_pc", "karras", "flux1", "ring2-sharded"),
        ("dpm_fast", "normal", "wan", "pipefusion2"),
        ("euler_ancestral_cfg_pp", "beta", "wan", "cfg2"),
    ],
)
def test_samplers_of_the_quick_run_give_the_stock_latent(
    latent_of: LatentOf, sampler: str, scheduler: str, model: str, plan: str
) -> None:
    check(latent_of, *job(model, plan, sampler_name=sampler, scheduler=scheduler))


@thorough  # in the quick run three of these, and dpmpp_2m_sde, sa_solver and euler on FLUX.1
@samplers_of(SPECIAL)
def test_samplers_with_a_special_trait_give_the_stock_latent(
    latent_of: LatentOf, sampler: str, scheduler: str, model: str, plan: str
) -> None:
    check(latent_of, *job(model, plan, sampler_name=sampler, scheduler=scheduler))


@thorough  # tests/denoise/test_samplers.py compares each with ComfyUI's, call by call, on the whole picture and in patches
@samplers_of(tuple(name for name in LOCAL if name not in SPECIAL))
def test_all_other_samplers_give_the_stock_latent(
    latent_of: LatentOf, sampler: str, scheduler: str, model: str, plan: str
) -> None:
    check(latent_of, *job(model, plan, sampler_name=sampler, scheduler=scheduler))


def test_all_samplers_of_comfyuis_list_are_known(comfyui: ComfyUI) -> None:
    for kind in ("KSampler", "ParallelSampler"):
        (known, *more) = comfyui.object_info(kind)["input"]["required"]["sampler_name"]
        listed = known if isinstance(known, list) else more[0]["options"]
        names = {name for name in listed if not name.startswith("cogvideox")}
        assert names >= {*LOCAL, *NOT_LOCAL}
        tell_new("samplers", names - {*LOCAL, *NOT_LOCAL})


BATCH = {"devices": "cpu:2", "data": 2, "cfg": 1, "ulysses": 1, "ring": 1}


@pytest.mark.parametrize("sampler", ["sa_solver", pytest.param("euler_cfg_pp", marks=thorough)])
def test_a_batch_over_data_ranks_gives_the_stock_latent(latent_of: LatentOf, sampler: str) -> None:
    """The noise that a sampler draws and the negative prediction that it reads are those of the whole batch."""
    graph = ksampler_graph(NARROW, **SIZE, batch=3, cfg=2.0, sampler=sampler)
    check(latent_of, graph, parallel(graph, sampler=True, **BATCH))


@thorough  # in the quick run denoise/test_samplers has masks, and test_video_inputs a mask of a video
def test_a_mask_of_a_video_gives_the_stock_latent(latent_of: LatentOf) -> None:
    graph = masked(graph_of("wan", sampler_name="uni_pc", steps=4), 10, 9, 3)
    assert relative_error(latent_of(graph_of("wan", sampler_name="uni_pc", steps=4)), latent_of(graph)) > TOLERANCE
    check(latent_of, graph, spread(graph, **PLANS["ulysses2"]))


def test_cfg_pp_uses_the_negative_at_cfg_1(latent_of: LatentOf) -> None:
    stock, ours = job("flux1", "cfg2", sampler_name="dpmpp_2m_cfg_pp", cfg=1.0)
    check(latent_of, stock, ours)


@thorough  # in the quick run denoise/test_program has a cache's answer for both branches, and test_step_caches both caches
@pytest.mark.parametrize("cache", ["EasyCache", "LazyCache"])
def test_a_step_cache_under_a_sampler_that_reads_the_negative_gives_the_stock_latent(
    latent_of: LatentOf, cache: str
) -> None:
    settings = {"reuse_threshold": 0.5, "start_percent": 0.15, "end_percent": 0.95, "verbose": False}
    plain = ksampler_graph(NARROW, **SIZE, steps=8, cfg=2.0, sampler="euler_cfg_pp")
    graph = insert_after_model(plain, cache, **settings)
    assert relative_error(latent_of(graph), latent_of(plain)) > TOLERANCE
    check(latent_of, graph, parallel(graph, sampler=True, **PLANS["cfg2"]))


ADAPTIVE = "the sampler dpm_adaptive, which takes a norm of the latent"


@thorough  # in the quick run test_other_packs has a sampler that takes a norm of the latent, and the next test the refusal
def test_a_sampler_that_reads_the_latent_runs_one_call_at_a_time(assert_equal_latents: EqualLatents) -> None:
    graph = ksampler_graph(NARROW, **SIZE, cfg=1.0, sampler="dpm_adaptive")
    log = assert_equal_latents(parallel(graph, **PLANS["ulysses2"]), graph)
    assert ways(log) == [ADAPTIVE]
    assert "choose another sampler, such as euler or dpmpp_2m" in log


def test_parallel_sampler_refuses_a_sampler_that_reads_the_latent(comfyui: ComfyUI) -> None:
    graph = ksampler_graph(NARROW, **SIZE, cfg=1.0, sampler="dpm_adaptive")
    assert refused(comfyui, parallel(graph, sampler=True, **PLANS["ulysses2"])) == (
        f"Parallel Sampler does not support {ADAPTIVE}: choose another sampler, such as euler or dpmpp_2m, or KSampler, which is "
        "slower (one model call at a time)."
    )


@pytest.mark.parametrize(
    ("workers", "stages"),
    [
        (2, 1),
        # in the quick run engine/test_products has stages, and cfg 2 with them
        pytest.param(4, 2, marks=thorough),
    ],
)
def test_cfg_pp_in_patches_equals_one_workers_patches(latent_of: LatentOf, workers: int, stages: int) -> None:
    """Each patch's sampler receives both branches; with two workers for the branches, from both workers."""
    graph = ksampler_graph(NARROW, **SIZE, steps=3, cfg=2.0, sampler="euler_cfg_pp")
    stale = {"patches": 3, "warmup_steps": 1, "ulysses": 1, "ring": 1}
    one = parallel(graph, sampler=True, devices="cpu", pipefusion=1, cfg=1, **stale)
    several = parallel(graph, sampler=True, devices=f"cpu:{workers}", pipefusion=stages, cfg=2, **stale)
    assert relative_error(latent_of(several), latent_of(one)) <= TOLERANCE
    assert TOLERANCE < relative_error(latent_of(one), latent_of(graph)) < 1


@thorough  # in the quick run test_stock_nodes_on_flux has both nodes, and engine/test_products the parts of a batch
def test_cfg_norm_and_cfg_zero_star_over_data_ranks_give_the_stock_latent(latent_of: LatentOf) -> None:
    """CFGNorm and CFGZeroStar change the guidance before a CFG++ sampler reads it; data ranks hold parts of the batch."""
    plain = ksampler_graph(NARROW, **SIZE, batch=2, cfg=3.0, sampler="euler_cfg_pp")
    graph = insert_after_model(insert_after_model(plain, "CFGNorm", strength=0.9), "CFGZeroStar")
    assert relative_error(latent_of(plain), latent_of(graph)) > 1e-2
    check(latent_of, graph, parallel(graph, sampler=True, **BATCH))


def test_guidance_that_needs_the_whole_picture_runs_one_call_at_a_time_with_pipefusion(
    assert_equal_latents: EqualLatents,
) -> None:
    graph = insert_after_model(ksampler_graph(NARROW, **SIZE, cfg=2.0), "CFGNorm", strength=1.0)
    log = assert_equal_latents(parallel(graph, devices="cpu:2", pipefusion=2, cfg=1, warmup_steps=99), graph)
    assert ways(log) == ["CFGNorm with PipeFusion"]
