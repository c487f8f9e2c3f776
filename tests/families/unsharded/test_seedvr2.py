"""SeedVR2, whose class swaps the halves of a call with both prompts: a worker for each prompt, with texts from the model file."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from scripts.comfyui import ComfyUI
from tests.support.copies.sized import sized_copy
from tests.support.graphs.comfyui import DIFFERENT, TOLERANCE, LatentOf, graph_of, masked, save_latent, spread
from tests.support.graphs.diffusers import refused
from tests.support.graphs.family_checks import assert_equal_run, assert_stock
from tests.support.graphs.flux import Graph, insert_after, node, queue_logged, ways
from tests.support.graphs.unsharded import SPLITS
from tests.support.latents import relative_error, saved_latent
from tests.support.selection import thorough
from tests.support.tiny.comfyui import TINY, save_tiny
from tests.support.tiny.models import draw

NAME = "seedvr2"
BATCH = 3
TEXTS = {"positive": 58, "negative": 64}
"""Tokens of each text, as published."""

pytestmark = thorough


@pytest.fixture(scope="module")
def comfyui(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ComfyUI]:
    """Start a copy of ComfyUI that reads the class's sizes from the file, with the model and latents."""
    server = sized_copy(tmp_path_factory.mktemp("seedvr2"))
    path = save_tiny(server.base_dir / "models" / "diffusion_models", NAME)
    texts = {f"{side}_conditioning": draw(tokens, 5120, seed=tokens) for side, tokens in TEXTS.items()}
    save_file(load_file(path) | texts, path, TINY[NAME].metadata)
    for name in (NAME, "seen"):
        save_latent(server, name, BATCH, *TINY[NAME].latent)
    with server:
        yield server


def upscaled(**settings: Any) -> Graph:
    """Return a graph of a batch of three, with the stock loader, the MODEL's own texts and the latent to upscale."""
    graph = graph_of(NAME, steps=2, **settings) | {
        "seen": node("LoadLatent", latent="seen.latent"),
        "positive": node("SeedVR2Conditioning", model=["model", 0], vae_conditioning=["seen", 0]),
    }
    del graph["negative"]
    graph["sampler"]["inputs"]["negative"] = ["positive", 1]
    return graph


@pytest.mark.parametrize("split", ["cfg 2", "one worker"])
def test_prompts_in_separate_calls_give_the_stock_result(split: str, comfyui: ComfyUI, latent_of: LatentOf) -> None:
    """The lengths of the texts differ so that ComfyUI never puts both into one call."""
    stock = latent_of(upscaled())
    assert relative_error(latent_of(upscaled(cfg=1.0)), stock) > DIFFERENT
    assert_equal_run(comfyui, spread(upscaled(), **SPLITS[split]), stock)


def test_data_ranks_are_refused_for_a_batch_with_one_text(comfyui: ComfyUI) -> None:
    """ComfyUI's class gives every video of a batch the first one's text."""
    said = refused(comfyui, spread(upscaled(), **SPLITS["data 2, cfg 2"]))
    assert said.startswith("data 2 is more than the batch of 1")


def test_prompts_that_share_a_call_give_the_stock_result_only_on_one_worker(
    comfyui: ComfyUI, latent_of: LatentOf
) -> None:
    graph = upscaled()
    graph["sampler"]["inputs"]["negative"] = graph["sampler"]["inputs"]["positive"]
    alone = spread(graph, "cpu:1", strict=False)
    assert relative_error(latent_of(alone), latent_of(graph)) <= TOLERANCE
    assert "computes the rows of a batch together" in refused(comfyui, spread(graph, strict=False, cfg=2))


@pytest.mark.parametrize("split", ["cfg 2", "one worker"])
def test_one_model_call_at_a_time_gives_the_stock_result(split: str, comfyui: ComfyUI, latent_of: LatentOf) -> None:
    """The workers make the same model calls as ComfyUI if a prompt has a mask."""
    shown = {"mask": ["where", 0], "strength": 1.0, "set_cond_area": "default"}
    graph = insert_after(upscaled(), "positive", "ConditioningSetMask", "conditioning", **shown)
    graph["where"] = node("SolidMask", value=0.6, width=80, height=64)
    stock = latent_of(graph)
    run, log = queue_logged(comfyui, spread(graph, strict=False, **SPLITS[split]))
    assert relative_error(saved_latent(comfyui, run.check()), stock) <= TOLERANCE
    assert "mask in the conditioning" in ways(log)[0]


def test_a_graph_without_a_negative_gives_the_stock_result(latent_of: LatentOf) -> None:
    """The model's templates have no negative prompt."""
    graph = upscaled(cfg=1.0)
    assert_stock(latent_of, graph, devices="cpu:1")


def test_a_mask_gives_the_stock_result(latent_of: LatentOf) -> None:
    graph = masked(upscaled(), 10, 8, 3)
    assert_stock(latent_of, graph, strict=False, cfg=2)
