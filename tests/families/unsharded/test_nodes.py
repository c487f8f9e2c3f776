"""Stock nodes for Stable Diffusion on an unsharded model: the stock result, or a refusal by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from scripts.comfyui import ComfyUI
from tests.support.graphs.comfyui import LatentOf, graph_of, spread
from tests.support.graphs.diffusers import refused
from tests.support.graphs.family_checks import assert_matters_and_stock, assert_stock
from tests.support.graphs.family_tests import save_with_prompts
from tests.support.graphs.flux import Graph, insert_after_model, node, step_by_step
from tests.support.graphs.guidance import NAG, SKIPPING
from tests.support.graphs.unsharded import batched
from tests.support.selection import thorough

SAME: Mapping[str, dict[str, Any]] = {
    "RescaleCFG": {"multiplier": 0.7},
    "ModelSamplingDiscrete": {"sampling": "v_prediction", "zsnr": False},
    "ModelSamplingContinuousEDM": {"sampling": "eps", "sigma_max": 120.0, "sigma_min": 0.002},
    "ModelSamplingStableCascade": {"shift": 2.0},
    "CFGNorm": {"strength": 0.8},
    "Mahiro": {},
    "TCFG": {},
    "EasyCache": {"reuse_threshold": 0.9, "start_percent": 0.0, "end_percent": 1.0, "verbose": False},
}
"""Nodes whose result is the stock one, in the workers' loop or one model call at a time."""

REFUSED: Mapping[str, tuple[dict[str, Any], str]] = {
    "HyperTile": ({"tile_size": 64, "swap_size": 2, "max_depth": 0, "scale_depth": False}, "attn1_patch"),
    "TomePatchModel": ({"ratio": 0.3}, "attn1_patch"),
    "PatchModelAddDownscale": (
        {
            "block_number": 1,
            "downscale_factor": 2.0,
            "start_percent": 0.0,
            "end_percent": 0.35,
            "downscale_after_skip": True,
            "downscale_method": "bicubic",
            "upscale_method": "bicubic",
        },
        "input_block_patch",
    ),
    "SelfAttentionGuidance": ({"scale": 0.5, "blur_sigma": 2.0}, "replaced attention or blocks"),
    "PackAttention": ({}, "replaced attention or blocks (attn2)"),  # as IPAdapter does
    "PerturbedAttentionGuidance": ({"scale": 3.0}, "replaced attention or blocks"),
}
"""Nodes whose functions change the inside of the model, and the part of the refusal that names them."""


@pytest.fixture(scope="module", autouse=True)
def _files(comfyui: ComfyUI) -> None:
    save_with_prompts(comfyui, "sd15")
    save_with_prompts(comfyui, "sd15_scales")
    save_with_prompts(comfyui, "hunyuan3d")


def job(name: str = "sd15", batch: int = 2, **settings: Any) -> Graph:
    """Return the graph of a batch, of three steps by default."""
    return batched(graph_of(name, **{"steps": 3} | settings), batch)


@thorough  # in the quick run test_keeping_step has RescaleCFG and test_step_caches EasyCache, both on FLUX.1
@pytest.mark.parametrize("kind", SAME)
def test_a_node_gives_the_stock_result(kind: str, latent_of: LatentOf) -> None:
    graph = insert_after_model(job(), kind, **SAME[kind])
    assert_stock(latent_of, graph, devices="cpu:2", strict=False, cfg=2)


def with_free_u(plain: Graph, kind: str) -> Graph:
    """Insert the node and a second FreeU_V2 after it."""
    settings = {"b1": 1.1, "b2": 1.4, "s1": 0.9, "s2": 0.2}
    graph = insert_after_model(plain, kind, **settings)
    return insert_after_model(graph, "FreeU_V2", **settings | {"b2": 0.8})


@pytest.mark.parametrize(("kind", "data"), [pytest.param("FreeU", 2, marks=thorough), ("FreeU_V2", 1)])
def test_free_u_gives_the_stock_result(kind: str, data: int, latent_of: LatentOf) -> None:
    plain = job("sd15_scales", batch=data, steps=2)
    graph = with_free_u(plain, kind)
    assert_matters_and_stock(latent_of, plain, graph, devices=f"cpu:{2 * data}", cfg=2, data=data)


@thorough
@pytest.mark.parametrize("kind", ["FreeU", "FreeU_V2"])
def test_free_u_one_model_call_at_a_time_gives_the_stock_result(kind: str, latent_of: LatentOf) -> None:
    graph = step_by_step(with_free_u(job("sd15_scales"), kind))
    assert_stock(latent_of, graph, devices="cpu:2", strict=False, cfg=2)


def guided() -> tuple[Graph, Graph]:
    """Return a graph without and with a guidance that compares both prompts.

    The prompts have one length, so ComfyUI puts both into one call.
    """
    plain = job()
    plain["negative"] = node("ConditioningMultiply", conditioning=["positive", 0], multiplier=0.5)
    return plain, insert_after_model(plain, "NAGuidance", **NAG)


@thorough  # in the quick run test_attention_guidance on FLUX.1
def test_a_guidance_that_compares_both_prompts_gives_the_stock_result_on_one_worker(latent_of: LatentOf) -> None:
    plain, graph = guided()
    assert_matters_and_stock(latent_of, plain, graph, devices="cpu:1", strict=False)


def test_a_guidance_that_compares_both_prompts_is_refused_with_cfg_2(comfyui: ComfyUI) -> None:
    assert "NAGuidance compares both prompts" in refused(comfyui, spread(guided()[1], "cpu:2", strict=False, cfg=2))


@pytest.mark.parametrize("split", ["cpu:1", pytest.param("cpu:2", marks=thorough)])
def test_blocks_that_a_guidance_skips_give_the_stock_result(split: str, latent_of: LatentOf) -> None:
    plain = graph_of("hunyuan3d", steps=2)
    graph = insert_after_model(plain, "SkipLayerGuidanceDiT", **SKIPPING | {"single_layers": "0"})
    assert_matters_and_stock(latent_of, plain, graph, devices=split, strict=False)


@pytest.mark.parametrize(  # in the quick run refusals/lists has PerturbedAttentionGuidance on FLUX.1
    "kind", [pytest.param(kind, marks=[thorough] * (kind == "PerturbedAttentionGuidance")) for kind in REFUSED]
)
def test_a_node_that_changes_the_inside_of_the_model_is_refused(kind: str, comfyui: ComfyUI) -> None:
    inputs, said = REFUSED[kind]
    graph = insert_after_model(graph_of("sd15", steps=2), kind, **inputs)
    assert said in refused(comfyui, spread(graph, "cpu:1", strict=False))


@thorough
@pytest.mark.parametrize("dtype", ["fp8_e4m3fn", "fp8_e5m2"])
def test_weights_in_fp8_give_the_stock_result(dtype: str, latent_of: LatentOf) -> None:
    graph = job()
    graph["model"]["inputs"]["weight_dtype"] = dtype
    assert_stock(latent_of, graph, cfg=2)


@thorough
@pytest.mark.parametrize(
    "sampler", ["euler_ancestral", "dpmpp_2m", "dpmpp_sde", "ddim", "uni_pc", "lcm", "dpm_adaptive"]
)
def test_samplers_give_the_stock_result(sampler: str, latent_of: LatentOf) -> None:
    graph = job(sampler_name=sampler, scheduler="karras")
    assert_stock(latent_of, graph, devices="cpu:4", strict=False, cfg=2, data=2)
