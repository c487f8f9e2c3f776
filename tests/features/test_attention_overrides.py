"""Nodes that replace attention with a function: ComfyUI's own functions run in the workers, others are refused by name.

The functions depend on token positions. One set is appended to a file of a copy of ComfyUI, another belongs to another node
pack.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from scripts.comfyui import ComfyUI
from tests.features.conftest import EqualLatents
from tests.support.comfyuis import only_in_newer
from tests.support.copies.sized import copied
from tests.support.graphs.comfyui import DIFFERENT, LatentOf, graph_of, save_families, spread
from tests.support.graphs.diffusers import refused
from tests.support.graphs.flux import Graph, insert_after_model, ways
from tests.support.latents import latents, relative_error
from tests.support.selection import thorough

pytestmark = thorough
"""These tests start a ComfyUI of their own; `models/test_overriding` tests the workers' half in the quick run."""

OWN, OF_THE_SERVER = "comfy_extras/nodes_mahiro.py", "comfy_extras/nodes_model_advanced.py"
"""Two files of comfy_extras: workers can import the first; the second imports `nodes`, which workers do not have."""

OWN_NODE = '''


class StandInNode:
    RETURN_TYPES, FUNCTION, CATEGORY = ("MODEL",), "patch", "stand-ins"

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"model": ("MODEL",), **cls.INPUTS}}


class StandInAttentionNode(StandInNode):
    """Puts attention in its place, from either file."""

    INPUTS = {"kind": ("STRING",), "heads": ("INT",), "file": ("STRING",)}

    def patch(self, model, kind, heads, file):
        return importlib.import_module(f"comfy_extras.{file}").StandInAttention().patch(model, kind, heads)


class StandInGuidanceNode(StandInNode):
    """Changes the guidance, from one of the two files."""

    INPUTS = {"kind": ("STRING",), "file": ("STRING",)}

    def patch(self, model, kind, file):
        return importlib.import_module(f"comfy_extras.{file}").StandInGuidance().patch(model, kind)


class StandInSparseNode(StandInNode):
    INPUTS = {"start": ("FLOAT",), "callbacks": ("STRING",), "counts": ("INT",)}

    def patch(self, model, start, callbacks, counts):
        file = importlib.import_module("comfy_extras.nodes_mahiro")
        return (file.with_sparse(model, start, callbacks, counts),)


import importlib
for each in (StandInAttentionNode, StandInGuidanceNode, StandInSparseNode):
    NODE_CLASS_MAPPINGS[each.__name__] = each
'''

KINDS = "causal", "block-sparse", "windowed"
HEADS = {"flux2": 3, "wan": 3}
SPLITS: dict[str, dict[str, Any]] = {
    "one": {"devices": "cpu:1"},
    "two": {"devices": "cpu:2", "ulysses": 2, "cfg": 1},
    "three": {"devices": "cpu:3", "ulysses": 3, "cfg": 1},
    "automatic": {"devices": "cpu:2", "cfg": 1},
    "prompts": {"devices": "cpu:4", "cfg": 2},
}


@pytest.fixture(scope="module")
def comfyui(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ComfyUI]:
    server = copied(tmp_path_factory.mktemp("overrides"), {OWN: OWN_NODE, OF_THE_SERVER: OWN_NODE, "nodes.py": NODE})
    save_families(server, *HEADS)
    with server:
        yield server


@pytest.fixture(scope="module")
def latent_of(comfyui: ComfyUI) -> LatentOf:
    return latents(comfyui)


def changed(name: str, kind: str, file: str = OWN) -> Graph:
    """Return a graph with two steps of a model in which a function of one of ComfyUI's files replaces attention."""
    given = {"kind": kind, "heads": HEADS[name], "file": Path(file).stem}
    return insert_after_model(graph_of(name, steps=2), "StandInAttentionNode", **given)


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", HEADS)
def test_comfyuis_own_function_gives_the_same_latent(
    name: str, kind: str, split: str, latent_of: LatentOf, assert_equal_latents: EqualLatents
) -> None:
    graph = changed(name, kind)
    assert relative_error(latent_of(graph_of(name, steps=2)), latent_of(graph)) > DIFFERENT
    log = assert_equal_latents(spread(graph, **SPLITS[split]), graph)
    assert ways(log) == ["loop"]
    assert "StandInAttention.patch.<locals>.override" in log


def sparse(name: str, start: float = 0.9, *, callbacks: str = "none", counts: int = 0) -> Graph:
    """Return a graph with two steps of a model whose attention is block-sparse below a sigma, in all blocks except the second."""
    chosen = {"start": start, "callbacks": callbacks, "counts": counts}
    return insert_after_model(graph_of(name, steps=2), "StandInSparseNode", **chosen)


@pytest.mark.parametrize("split", ["one", "two", "prompts"])
@pytest.mark.parametrize(
    ("callbacks", "way"),
    [("none", "loop"), ("puts it back", "loop"), ("by timestep", "the callback on_prepare_state")],
)
@pytest.mark.parametrize("name", HEADS)
def test_a_function_that_holds_an_object_as_block_sparse_attention_does_gives_the_same_latent(
    name: str, callbacks: str, way: str, split: str, latent_of: LatentOf, assert_equal_latents: EqualLatents
) -> None:
    graph = sparse(name, callbacks=callbacks)
    stock = latent_of(graph)
    assert relative_error(latent_of(graph_of(name, steps=2)), stock) > DIFFERENT
    assert relative_error(latent_of(sparse(name, 2.0)), stock) > DIFFERENT, "sigmas count"
    assert ways(assert_equal_latents(spread(graph, strict=False, **SPLITS[split]), graph)) == [way]


def test_an_attention_override_works_with_one_model_call_at_a_time(assert_equal_latents: EqualLatents) -> None:
    graph = insert_after_model(changed("flux2", "windowed"), "RescaleCFG", multiplier=0.7)
    log = assert_equal_latents(spread(graph, strict=False, **SPLITS["two"]), graph)
    assert ways(log) == ["the model option sampler_cfg_function"]


@pytest.mark.parametrize("degree", ["ring 2", "pipefusion 2", "patches 3"])
def test_ring_and_patches_are_refused_by_name(degree: str, comfyui: ComfyUI) -> None:
    name, number = degree.split()
    said = refused(comfyui, spread(changed("flux2", "causal"), "cpu:2", **{name: int(number)}))
    assert "an attention override (" in said and "StandInAttention.patch" in said
    assert f"which is not possible with {degree}: set {name} to 0 or 1 in Parallel Plan" in said


NOT_POSSIBLE: dict[str, tuple[Graph, str]] = {
    "state from call to call": (
        sparse("flux2", counts=1),
        "because it keeps state between calls (StandInSparse.seen)",
    ),
    "several heads mixed": (
        changed("flux2", "mean of heads"),
        "because its result for a part of the heads differs from its result for all heads together",
    ),
    "an option that workers do not receive": (
        changed("flux2", "by sides"),
        "because it reads cond_or_uncond, which the workers do not receive",
    ),
    "another pack's function": (
        insert_after_model(graph_of("flux2", steps=2), "PackOverride"),
        "PackOverride.patch.<locals>.override) cannot be applied to a parallel MODEL",
    ),
    "a module that workers cannot import": (
        changed("flux2", "causal", OF_THE_SERVER),
        "StandInAttention.patch.<locals>.override) cannot be applied to a parallel MODEL",
    ),
}


@pytest.mark.parametrize(("graph", "reason"), NOT_POSSIBLE.values(), ids=NOT_POSSIBLE)
def test_a_function_that_workers_cannot_run_is_refused_with_the_reason(
    graph: Graph, reason: str, comfyui: ComfyUI
) -> None:
    assert reason in refused(comfyui, spread(graph, **SPLITS["two"]))


@pytest.mark.parametrize(
    ("kind", "file", "way"),
    [
        ("latent", OWN, "loop"),
        ("batch", OWN, "the model option sampler_post_cfg_function"),
        ("latent", OF_THE_SERVER, "the model option sampler_post_cfg_function"),
    ],
)
def test_a_new_node_after_the_guidance_runs_in_the_workers_after_a_trial(
    kind: str, file: str, way: str, latent_of: LatentOf, assert_equal_latents: EqualLatents
) -> None:
    graph = insert_after_model(graph_of("flux2", steps=2), "StandInGuidanceNode", kind=kind, file=Path(file).stem)
    assert relative_error(latent_of(graph_of("flux2", steps=2)), latent_of(graph)) > DIFFERENT
    assert ways(assert_equal_latents(spread(graph, strict=False, **SPLITS["two"]), graph)) == [way]


@pytest.mark.parametrize("split", ["one", "two"])
def test_comfyuis_node_for_the_attention_backend_gives_the_same_latent(
    split: str, comfyui: ComfyUI, assert_equal_latents: EqualLatents
) -> None:
    kind = "ModelAttentionBackend"
    only_in_newer(kind, bool(comfyui.object_info(kind)))
    graph = insert_after_model(graph_of("wan", steps=2), kind, attention="pytorch attention")
    log = assert_equal_latents(spread(graph, **SPLITS[split]), graph)
    assert ways(log) == ["loop"]
    assert "set_model_optimized_attention" in log
