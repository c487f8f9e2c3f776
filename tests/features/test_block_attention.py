"""A node that injects attention into MiniMax-H3's blocks, as 0.36's BlockSparseAttention does, against the stock loader."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from scripts.comfyui import ComfyUI
from tests.support.copies.sparse_h3 import with_sparse_node
from tests.support.graphs.comfyui import DIFFERENT, TOLERANCE, save_families, spread
from tests.support.graphs.diffusers import refused
from tests.support.graphs.family_tests import save_lora_of
from tests.support.graphs.flux import Graph, insert_after_model
from tests.support.graphs.loras import with_lora
from tests.support.graphs.sound import assert_same, sound_graph
from tests.support.graphs.sound_tests import Stock, stock_of
from tests.support.latents import relative_error, saved_latent
from tests.support.selection import thorough
from tests.support.tiny.models import draw

pytestmark = thorough
"""These tests start a ComfyUI of their own and prove a changed class."""

SPLITS: dict[str, dict[str, Any]] = {
    "one": {"devices": "cpu:1"},
    "ulysses 2, streamed": {"devices": "cpu:2", "cfg": 1, "ulysses": 2, "weights": "streamed"},
    "ulysses 3, sharded": {"devices": "cpu:3", "cfg": 1, "ulysses": 3, "weights": "sharded"},
    "cfg 2 x ulysses 2": {"devices": "cpu:4", "cfg": 2, "ulysses": 2},
    "automatic": {"devices": "cpu:2", "cfg": 1},
}
KINDS = {"rows": False, "cubes": True}


@pytest.fixture(scope="module")
def comfyui(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ComfyUI]:
    server = with_sparse_node(tmp_path_factory.mktemp("sparse"))
    save_families(server, "minimax")
    file = server.base_dir / "models" / "diffusion_models" / "minimax.safetensors"
    tensors = load_file(file)
    for number, name in enumerate([name for name in tensors if name.endswith("attn.qkv_proj.weight")]):
        if name.startswith("blocks."):
            rows, columns = tensors[name].shape
            gate = draw(rows // 3, columns, seed=number) / columns**0.5
            tensors[name.replace("qkv_proj", "to_gate_compress")] = gate.to(tensors[name].dtype)
    save_file(tensors, file)
    save_lora_of(server, "minimax", ("blocks.0.attn.qkv_proj", "blocks.2.attn.out_proj"))
    with server:
        yield server


@pytest.fixture(scope="module")
def stock(comfyui: ComfyUI) -> Stock:
    return stock_of(comfyui)


def sparse(cubes: bool = True, start: float = 0.99, kind: str = "patch_of_block", **settings: Any) -> Graph:
    graph = sound_graph("minimax", **settings)
    return insert_after_model(graph, "StandInSparseBlocks", start=start, keep=2, cubes=cubes, kind=kind)


def differ(stock: Stock, one: Graph, other: Graph) -> bool:
    return relative_error(stock(one)[0], stock(other)[0]) > DIFFERENT


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("kind", KINDS)
def test_block_attention_gives_the_same_latents(kind: str, split: str, comfyui: ComfyUI, stock: Stock) -> None:
    """Injected attention gets all tokens of some heads in the model's order, its state of earlier steps, and a coarse gate."""
    graph = sparse(KINDS[kind])
    assert differ(stock, graph, sound_graph("minimax"))
    assert differ(stock, graph, sparse(KINDS[kind], start=2.0)), "sigmas count"
    assert_same(comfyui, spread(graph, **SPLITS[split]), stock(graph))


def test_block_attention_keeps_no_state_from_run_to_run(comfyui: ComfyUI, stock: Stock) -> None:
    for seed in (7, 8):
        graph = sparse(seed=seed)
        assert_same(comfyui, spread(graph, **SPLITS["ulysses 2, streamed"]), stock(graph))


def test_a_lora_with_block_attention_gives_the_same_latents(comfyui: ComfyUI, stock: Stock) -> None:
    graph = with_lora(sparse(), "minimax", 0.8)
    assert differ(stock, graph, sparse())
    assert_same(comfyui, spread(graph, **SPLITS["ulysses 3, sharded"]), stock(graph))


@pytest.mark.parametrize("plan", [{"ring": 2}, {"pipefusion": 2}])
def test_block_attention_with_ring_or_pipefusion_is_refused_by_name(plan: dict[str, int], comfyui: ComfyUI) -> None:
    said = refused(comfyui, spread(sparse(), devices="cpu:2", cfg=1, **plan))
    ((name, degree),) = plan.items()
    assert f"which is not possible with {name} {degree}: set {name} to 0 or 1 in Parallel Plan" in said


@pytest.mark.parametrize(
    ("kind", "what"),
    [
        ("patch_that_scales", "reads the values of the tokens"),
        ("patch_of_another_output", "returns another result than the block"),
    ],
)
def test_block_attention_that_reads_tokens_or_changes_the_output_is_refused(
    kind: str, what: str, comfyui: ComfyUI
) -> None:
    said = refused(comfyui, spread(sparse(kind=kind), **SPLITS["ulysses 2, streamed"]))
    assert what in said
    assert "remove that node, or use Load Diffusion Model" in said


def test_attention_that_looks_at_weights_is_refused(comfyui: ComfyUI, stock: Stock) -> None:
    """Only workers have the weights, so only they notice this. They start again after the error."""
    graph = spread(sparse(kind="patch_that_looks_at_weights"), **SPLITS["ulysses 2, streamed"])
    error = comfyui.queue(graph, timeout=600).error
    assert error is not None
    assert (
        "reads weight of the model's layers, which no worker has in full: remove that node" in error.exception_message
    )
    graph = sparse(seed=9)
    assert_same(comfyui, spread(graph, **SPLITS["ulysses 2, streamed"]), stock(graph))


def test_block_attention_outside_the_workers_loop_is_refused(comfyui: ComfyUI) -> None:
    """The attention's state from step to step would be lost."""
    graph = insert_after_model(sparse(), "RescaleCFG", multiplier=0.7)
    said = refused(comfyui, spread(graph, strict=False, **SPLITS["ulysses 2, streamed"]))
    assert "keeps state between steps and needs the workers' loop, which does not support" in said


def test_block_attention_on_another_model_class_is_refused_by_the_node(comfyui: ComfyUI) -> None:
    """The node checks the class of the model."""
    save_families(comfyui, "flux2")
    graph = sparse()
    graph["model"]["inputs"]["unet_name"] = "flux2.safetensors"
    error = comfyui.queue(spread(graph, **SPLITS["one"]), timeout=600).error
    assert error is not None and "this needs a MiniMax-H3 model" in error.exception_message


def test_only_blocks_without_injected_attention_are_compiled(comfyui: ComfyUI, stock: Stock) -> None:
    """Blocks with injected attention run uncompiled, and a message says so; the other blocks are compiled."""
    graph = insert_after_model(sparse(), "TorchCompileModel", backend="cudagraphs")
    run = comfyui.queue(spread(graph, **SPLITS["ulysses 2, streamed"]), timeout=600).check()
    latents = [saved_latent(comfyui, run, name) for name in ("save", "save sound")]
    assert max(relative_error(*pair) for pair in zip(latents, stock(sparse()), strict=True)) <= TOLERANCE
    assert any("a node replaces its attention, which cannot be compiled" in text.text for text in run.texts)
