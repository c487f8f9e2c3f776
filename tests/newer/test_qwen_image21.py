"""Qwen-Image 2.1, from ComfyUI 0.37: its class caches keys and values of text and references during a run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from scripts.comfyui import ComfyUI
from tests.support.comfyuis import only_in_newer
from tests.support.copies.sized import SIZES, copied
from tests.support.graphs.comfyui import (
    DIFFERENT,
    TOLERANCE,
    LatentOf,
    graph_of,
    save_families,
    save_latent,
    spread,
    with_reference,
)
from tests.support.graphs.diffusers import refused
from tests.support.graphs.family_checks import (
    assert_equal_run,
    assert_stale_patches_depend_on_patches_and_warmup_alone,
    assert_stock,
)
from tests.support.graphs.flux import Graph, insert_after_model, step_by_step
from tests.support.latents import relative_error
from tests.support.node_outcomes import newer_nodes

NAME, CACHE = "qwen_image21", "QwenImage21Cache"
SPLITS: dict[str, dict[str, Any]] = {
    "one worker": {"devices": "cpu:1"},
    "cfg 2": {"devices": "cpu:2", "cfg": 2},
    "ulysses 2, sharded": {"devices": "cpu:2", "cfg": 1, "ulysses": 2, "weights": "sharded"},
    "ring 2": {"devices": "cpu:2", "cfg": 1, "ring": 2},
    "ring 3, streamed": {"devices": "cpu:3", "cfg": 1, "ring": 3, "weights": "streamed"},
    "cfg 2 x ulysses 2": {"devices": "cpu:4", "cfg": 2, "ulysses": 2},
}
CACHES = {
    "as the class has it": {},
    "off": {"device": "off", "dtype": "default"},
    "in host memory": {"device": "cpu", "dtype": "default"},
    "in host memory, as int8": {"device": "cpu", "dtype": "int8"},
}
CONTROL = '''


class StandInFunControl:
    """Adds something to the tokens at one of the places where this model calls such functions, as its Fun control does."""

    RETURN_TYPES, FUNCTION, CATEGORY = ("MODEL",), "patch", "stand-ins"

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"model": ("MODEL",), "place": ("STRING",)}}

    def patch(self, model, place):
        model = model.clone()
        model.set_model_patch(lambda args: {"img": args["img"] * 1.5}, place)
        return (model,)


NODE_CLASS_MAPPINGS["StandInFunControl"] = StandInFunControl
'''


@pytest.fixture(scope="module")
def comfyui(comfyui: ComfyUI, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ComfyUI]:
    """Start a copy of ComfyUI that reads the model's sizes from the file; skip if this ComfyUI has no Qwen-Image 2.1."""
    only_in_newer(CACHE, bool(comfyui.object_info(CACHE)))
    code = {"comfy/model_detection.py": SIZES, "nodes.py": CONTROL}
    server = copied(tmp_path_factory.mktemp("qwen-image21"), code)
    save_families(server, NAME)
    save_latent(server, NAME, 1, 64, 7, 10)
    for name, size in {"qwen21-first": (6, 5), "qwen21-second": (4, 7)}.items():
        save_latent(server, name, 1, 64, *size)
    with server:
        yield server


def cached(cache: str, references: bool) -> Graph:
    """Return a graph of four steps: the first fills the cache, and three read it."""
    graph = graph_of(NAME, steps=4)
    if references:
        graph = with_reference(with_reference(graph, "qwen21-first"), "qwen21-second")
    return insert_after_model(graph, CACHE, **CACHES[cache]) if CACHES[cache] else graph


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("references", [False, True], ids=["text alone", "two references"])
@pytest.mark.parametrize("cache", CACHES)
def test_every_split_gives_the_stock_result(
    cache: str, references: bool, split: str, comfyui: ComfyUI, latent_of: LatentOf
) -> None:
    graph = cached(cache, references)
    assert_equal_run(comfyui, spread(graph, **SPLITS[split]), latent_of(graph))
    if "int8" in cache:
        assert relative_error(latent_of(graph), latent_of(cached("off", references))) > 10 * TOLERANCE
    if CACHES[cache]:
        assert newer_nodes()[CACHE] == "in the loop"
    if references:
        assert relative_error(latent_of(graph), latent_of(cached(cache, references=False))) > DIFFERENT


def test_one_model_call_at_a_time_gives_the_stock_result(latent_of: LatentOf) -> None:
    graph = step_by_step(cached("as the class has it", references=True))
    assert_stock(latent_of, graph, devices="cpu:1", strict=False)


@pytest.mark.parametrize("place", ["single_block", "post_input"])
def test_a_network_that_patches_the_blocks_is_refused_by_name(place: str, comfyui: ComfyUI) -> None:
    graph = insert_after_model(cached("as the class has it", references=False), "StandInFunControl", place=place)
    comfyui.queue(graph).check()
    message = refused(comfyui, spread(graph, cfg=1, ulysses=2))
    print(message)
    assert f"attention and block patches ({place})" in message


@pytest.mark.parametrize("references", [False, True], ids=["text alone", "two references"])
@pytest.mark.parametrize("cache", [cache for cache in CACHES if "int8" not in cache])
def test_pipefusion_gives_the_stock_result_while_all_steps_warm_up(
    cache: str, references: bool, comfyui: ComfyUI, latent_of: LatentOf
) -> None:
    graph = cached(cache, references)
    ours = spread(graph, "cpu:3", cfg=1, pipefusion=3, warmup_steps=99)
    assert_equal_run(comfyui, ours, latent_of(graph))


def test_stale_patches_depend_only_on_patches_and_warmup(latent_of: LatentOf) -> None:
    assert_stale_patches_depend_on_patches_and_warmup_alone(latent_of, cached("as the class has it", references=True))


def test_a_quantised_cache_under_pipefusion_is_refused_by_name(comfyui: ComfyUI, latent_of: LatentOf) -> None:
    graph = cached("in host memory, as int8", references=False)
    comfyui.queue(graph).check()
    message = refused(comfyui, spread(graph, cfg=1, pipefusion=2))
    print(message)
    assert message.startswith(
        "the cache of text and references with dtype int8 (QwenImage21Cache) cannot be used with "
    )
    off = insert_after_model(graph_of(NAME, steps=4), CACHE, device="off", dtype="int8")
    assert_stock(latent_of, off, cfg=1, pipefusion=2, warmup_steps=99)
