"""Nodes that put a function in attention's place: ComfyUI's own run in the workers, others are refused by name.

The functions look at where tokens are. They stand in a copy of ComfyUI behind one of its own files, and in another pack.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from scripts.comfyui import ComfyUI
from tests.comfyuis import only_in_newer
from tests.host.comfy_graphs import DIFFERENT, TOLERANCE, LatentOf, graph_of, save_families, spread
from tests.host.conftest import latents, relative_error, saved_latent
from tests.host.graphs import Graph, insert_after_model, queue_logged, ways
from tests.host.sized_copy import copied
from tests.host.test_families import refused
from tests.selection import thorough

pytestmark = thorough
"""It takes a ComfyUI of its own; what the workers do of this is in `models/test_overriding`."""

OWN, OF_THE_SERVER = "comfy_extras/nodes_mahiro.py", "comfy_extras/nodes_model_advanced.py"
"""Of comfy_extras' files one that workers can import, and one that imports `nodes`, which they have not."""

OWN_NODE = '''


def _masked(func, q, k, v, heads, allowed, kwargs):
    if not kwargs.get("skip_reshape", False):
        q, k, v = (x.unflatten(2, (heads, -1)).transpose(1, 2) for x in (q, k, v))
    at, to = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])[None]
    mask = torch.stack([allowed(at, to, head) | (to == 0) for head in range(heads)])[None]
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    return out if kwargs.get("skip_output_reshape", False) else out.transpose(1, 2).flatten(2)


class StandInAttention:
    """Causal, block-sparse or windowed attention, with a window of its own for each head; or the mean of all heads."""

    def patch(self, model, kind, heads):
        widths = [2 + 3 * (head % 4) for head in range(heads)]

        def override(func, q, k, v, heads, mask=None, **kwargs):
            if kind == "mean of heads":
                out = func(q, k, v, heads, mask=mask, **{**kwargs, "skip_output_reshape": True})
                out = out.mean(1, keepdim=True).expand_as(out)
                return out if kwargs.get("skip_output_reshape", False) else out.transpose(1, 2).flatten(2)
            allowed = {
                "causal": lambda at, to, head: to <= at,
                "block-sparse": lambda at, to, head: (at // 3 - to // 3) % 3 == 0,
                "windowed": lambda at, to, head: (at - to).abs() <= widths[head],
            }[kind]
            return _masked(func, q, k, v, heads, allowed, kwargs)

        m = model.clone()
        m.model_options["transformer_options"]["optimized_attention_override"] = override
        return (m,)


import torch
'''

NODE = '''


class StandInAttentionNode:
    """Puts it in its place, from either file."""

    RETURN_TYPES, FUNCTION, CATEGORY = ("MODEL",), "patch", "stand-ins"

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"model": ("MODEL",), "kind": ("STRING",), "heads": ("INT",), "file": ("STRING",)}}

    def patch(self, model, kind, heads, file):
        return importlib.import_module(f"comfy_extras.{file}").StandInAttention().patch(model, kind, heads)


import importlib
NODE_CLASS_MAPPINGS["StandInAttentionNode"] = StandInAttentionNode
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
    """Two steps of a model with a function in attention's place, of one of ComfyUI's files."""
    given = {"kind": kind, "heads": HEADS[name], "file": Path(file).stem}
    return insert_after_model(graph_of(name, steps=2), "StandInAttentionNode", **given)


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", HEADS)
def test_comfyuis_own_function_gives_the_same_latent(
    name: str, kind: str, split: str, comfyui: ComfyUI, latent_of: LatentOf
) -> None:
    graph = changed(name, kind)
    stock = latent_of(graph)
    assert relative_error(latent_of(graph_of(name, steps=2)), stock) > DIFFERENT
    run, log = queue_logged(comfyui, spread(graph, **SPLITS[split]))
    error = relative_error(saved_latent(comfyui, run.check()), stock)
    print(name, kind, split, f"{error:.1e}")
    assert error <= TOLERANCE
    assert ways(log) == ["loop"]
    assert "StandInAttention.patch.<locals>.override" in log


def test_one_model_call_at_a_time(comfyui: ComfyUI, latent_of: LatentOf) -> None:
    graph = insert_after_model(changed("flux2", "windowed"), "RescaleCFG", multiplier=0.7)
    run, log = queue_logged(comfyui, spread(graph, strict=False, **SPLITS["two"]))
    assert relative_error(saved_latent(comfyui, run.check()), latent_of(graph)) <= TOLERANCE
    assert ways(log) == ["the model option sampler_cfg_function"]


@pytest.mark.parametrize(
    ("plan", "names"),
    [
        ({"devices": "cpu:2", "ring": 2}, "ring 2"),
        ({"devices": "cpu:2", "pipefusion": 2}, "pipefusion 2"),
        ({"devices": "cpu:2", "patches": 3}, "patches 3"),
    ],
)
def test_ring_and_patches_are_refused_by_name(plan: dict[str, Any], names: str, comfyui: ComfyUI) -> None:
    said = refused(comfyui, spread(changed("flux2", "causal"), **plan))
    assert "an attention override (" in said and "StandInAttention.patch" in said
    assert f"which it cannot with {names}: set {names.split()[0]} to 0 or 1 in Parallel Plan" in said


def test_a_function_that_looks_at_several_heads_is_refused(comfyui: ComfyUI) -> None:
    said = refused(comfyui, spread(changed("flux2", "mean of heads"), **SPLITS["two"]))
    assert "because it gives something else for some of the heads than for all of them at once" in said


def test_another_packs_function_is_refused_by_name(comfyui: ComfyUI) -> None:
    graph = insert_after_model(graph_of("flux2", steps=2), "PackOverride")
    said = refused(comfyui, spread(graph, **SPLITS["two"]))
    assert "PackOverride.patch.<locals>.override) cannot be applied to a parallel MODEL" in said


def test_a_function_whose_module_workers_cannot_import_is_refused_by_name(comfyui: ComfyUI) -> None:
    said = refused(comfyui, spread(changed("flux2", "causal", OF_THE_SERVER), **SPLITS["two"]))
    assert "StandInAttention.patch.<locals>.override) cannot be applied to a parallel MODEL" in said


@pytest.mark.parametrize("split", ["one", "two"])
def test_comfyuis_choice_of_attention(split: str, comfyui: ComfyUI, latent_of: LatentOf) -> None:
    kind = "ModelAttentionBackend"
    only_in_newer(kind, bool(comfyui.object_info(kind)))
    graph = insert_after_model(graph_of("wan", steps=2), kind, attention="pytorch attention")
    run, log = queue_logged(comfyui, spread(graph, **SPLITS[split]))
    assert relative_error(saved_latent(comfyui, run.check()), latent_of(graph)) <= TOLERANCE
    assert ways(log) == ["loop"]
    assert "set_model_optimized_attention" in log
