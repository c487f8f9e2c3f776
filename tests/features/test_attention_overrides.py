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


def _masked(func, q, k, v, heads, allowed, kwargs):
    if not kwargs.get("skip_reshape", False):
        q, k, v = (x.unflatten(2, (heads, -1)).transpose(1, 2) for x in (q, k, v))
    at, to = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])[None]
    mask = torch.stack([allowed(at, to, head) | (to == 0) for head in range(heads)])[None]
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    return out if kwargs.get("skip_output_reshape", False) else out.transpose(1, 2).flatten(2)


class StandInAttention:
    """Windowed attention, with a window of its own for each head; or the mean of all heads."""

    def patch(self, model, kind, heads):
        widths = [2 + 3 * (head % 4) for head in range(heads)]

        def override(func, q, k, v, heads, mask=None, **kwargs):
            if kind == "mean of heads":
                out = func(q, k, v, heads, mask=mask, **{**kwargs, "skip_output_reshape": True})
                out = out.mean(1, keepdim=True).expand_as(out)
                return out if kwargs.get("skip_output_reshape", False) else out.transpose(1, 2).flatten(2)
            return _masked(func, q, k, v, heads, lambda at, to, head: (at - to).abs() <= widths[head], kwargs)

        def by_sides(func, q, k, v, heads, mask=None, **kwargs):
            sides = kwargs["transformer_options"].get("cond_or_uncond", [0])
            return func(q, k, v, heads, mask=mask, **kwargs) * (1 + sides[0])

        m = model.clone()
        m.model_options["transformer_options"]["optimized_attention_override"] = by_sides if kind == "by sides" else override
        return (m,)


class StandInGuidance:
    """A function after the guidance: of each latent separately, or of the whole batch."""

    def patch(self, model, kind):
        axes = {"latent": (1, 2, 3, 4), "batch": (0, 1, 2, 3, 4)}[kind]

        def louder(args):
            """Move the latents apart from their mean."""
            denoised = args["denoised"]
            mean = denoised.mean([axis for axis in axes if axis < denoised.ndim], keepdim=True)
            return denoised + 0.2 * args["cond_scale"] * (denoised - mean)

        m = model.clone()
        m.set_model_sampler_post_cfg_function(louder)
        return (m,)


class StandInSparse:
    """Options of a function and what it remembers, as BlockSparseAttention's of 0.36: only that is in the sequence of a run."""

    def __init__(self, start, end, dense_blocks, counts):
        self.start = start
        self.end = end
        self.dense_blocks = dense_blocks
        self.counts = counts
        self.installed = set()
        self.reset()

    def reset(self):
        self.seen = 0

    def dense(self, options):
        self.seen += self.counts
        sigma = float(options["sigmas"][0]) if "sigmas" in options else 0.5
        return sigma > self.start or sigma < self.end or options.get("block_index") in self.dense_blocks


def sparse_override(patch, previous):
    def override(func, q, k, v, heads, mask=None, **kwargs):
        if patch.dense(kwargs.get("transformer_options") or {}):
            ours = func if previous is None else functools.partial(previous, func)
            return ours(q, k, v, heads, mask=mask, **kwargs)
        return _masked(func, q, k, v, heads, lambda at, to, head: (at // 3 - to // 3) % 3 == 0, kwargs)

    return override


def install_sparse(patch, options):
    current = options.get("optimized_attention_override")
    if current not in patch.installed:
        options["optimized_attention_override"] = sparse_override(patch, current)
        patch.installed.add(options["optimized_attention_override"])


def with_sparse(model, start, callbacks, counts):
    patch = StandInSparse(start=start, end=0.0, dense_blocks={1}, counts=counts)
    m = model.clone()
    install_sparse(patch, m.model_options["transformer_options"])
    if callbacks == "puts it back":
        again = lambda _, __, options: install_sparse(patch, options["transformer_options"])
        m.add_callback_with_key("on_prepare_state", "sparse", again)
        m.add_callback_with_key("on_cleanup", "sparse", lambda _: patch.reset())
    if callbacks == "by timestep":
        told = lambda _, timestep, options: options["transformer_options"].update(stand_in=float(timestep[0]))
        m.add_callback_with_key("on_prepare_state", "sparse", told)
    return m


import functools
import torch
'''

NODE = '''


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
@pytest.mark.parametrize("name", HEADS)
def test_comfyuis_own_function_gives_the_same_latent(
    name: str, split: str, latent_of: LatentOf, assert_equal_latents: EqualLatents
) -> None:
    """models/test_function_override has other functions, under more splits."""
    graph = changed(name, "windowed")
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
    said = refused(comfyui, spread(changed("flux2", "windowed"), "cpu:2", **{name: int(number)}))
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
        ".overridden) cannot be applied to a parallel MODEL",
    ),
    "a module that workers cannot import": (
        changed("flux2", "windowed", OF_THE_SERVER),
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
