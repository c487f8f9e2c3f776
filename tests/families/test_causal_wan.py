"""Causal Wan, a class without a written declaration: a real ComfyUI derives one from a graph's own call; the stock result."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from playwright.sync_api import Browser, expect
from safetensors.torch import load_file

from parallel_backend.wire.handshake import VARIABLE
from scripts.comfyui import PACKS, REPO, ComfyUI
from tests.derive.files import save_checkpoint, save_forms
from tests.support.graphs.comfyui import (
    TOLERANCE,
    LatentOf,
    graph_of,
    save_families,
    save_latent,
    spread,
)
from tests.support.graphs.derived import FOUND, PATIENCE, own_cache
from tests.support.graphs.diffusers import refused
from tests.support.graphs.family_checks import assert_equal_run, assert_matters_and_stock
from tests.support.graphs.family_tests import save_lora_of
from tests.support.graphs.flux import Graph, insert_after, insert_after_model, node, queue_logged
from tests.support.graphs.loras import with_lora
from tests.support.latents import relative_error, saved_latent
from tests.support.page import browser
from tests.support.selection import thorough
from tests.support.tiny.comfyui import TINY

pytestmark = thorough

NAME = "causal_wan"


def of_file(file: str, graph: Graph | None = None) -> Graph:
    """Return the tests' small graph, or `graph` if given, with another file of the model."""
    graph = graph or graph_of(NAME, steps=2)
    model = node("UNETLoader", **graph["model"]["inputs"] | {"unet_name": file})
    return graph | {"model": model}


@pytest.fixture(scope="module")
def comfyui(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ComfyUI]:
    """Start a ComfyUI that has derived no declaration yet."""
    folder = tmp_path_factory.mktemp("derived")
    server = ComfyUI(
        os.environ["COMFYUI_PATH"],
        folder / "base",
        env={VARIABLE: str(folder / "secret"), **own_cache(folder)},
        packs={**PACKS, "other-pack": REPO / "tests" / "support" / "other_pack"},
    )
    save_families(server, NAME)
    save_latent(server, NAME, 1, *TINY[NAME].latent)
    save_latent(server, f"{NAME}-frame", 1, 16, 1, 8, 10)
    save_latent(server, f"{NAME}-batch", 2, *TINY[NAME].latent)
    models = server.base_dir / "models"
    save_forms(models / "diffusion_models", NAME)
    tensors = load_file(models / "diffusion_models" / f"{NAME}.safetensors")
    save_checkpoint(models / "checkpoints" / f"{NAME}.safetensors", tensors, TINY[NAME].metadata or {})
    save_lora_of(server, NAME, ("blocks.1.self_attn.q",))
    with server:
        yield server


@pytest.fixture(scope="module", autouse=True)
def derived(comfyui: ComfyUI) -> str:
    """Queue a graph that runs without a declaration, wait until the class has one, and return what was proved, in words.

    The file is in scaled fp8: a declaration belongs to the class, for any weights of its files.
    """
    graph = of_file(f"{NAME}-marks.safetensors")
    run, log = queue_logged(comfyui, spread(graph, cfg=2), timeout=PATIENCE)
    stock = comfyui.queue(graph, timeout=PATIENCE).check()
    assert relative_error(saved_latent(comfyui, run.check()), saved_latent(comfyui, stock)) <= TOLERANCE
    assert not FOUND.search(log)
    until = time.monotonic() + PATIENCE
    while (found := FOUND.search(comfyui.log)) is None:
        assert time.monotonic() < until, comfyui.log[-2000:]
        assert "was not derived" not in comfyui.log, comfyui.log[-2000:]
        time.sleep(1)
    assert found[1] == "WAN21_CausalAR_T2V"
    return found[2]


SPLITS: Mapping[str, dict[str, Any]] = {
    "ulysses 2": {"devices": "cpu:2", "cfg": 1, "ulysses": 2},
    "cfg 2, ulysses 2": {"devices": "cpu:4", "cfg": 2, "ulysses": 2},
    "ring 2, sharded": {"devices": "cpu:2", "cfg": 1, "ring": 2, "weights": "sharded"},
    "ulysses 2, streamed": {"devices": "cpu:2", "cfg": 1, "ulysses": 2, "weights": "streamed"},
    "pipefusion 2": {"devices": "cpu:2", "cfg": 1, "pipefusion": 2, "warmup_steps": 99},
    "automatic": {"devices": "cpu:2"},
}


@pytest.mark.parametrize("split", SPLITS)
def test_a_derived_class_gives_the_stock_result_under_every_split(
    split: str, derived: str, comfyui: ComfyUI, latent_of: LatentOf
) -> None:
    """Before the derivation the class ran unsharded; now it runs under plans that unsharded models do not support."""
    assert "ulysses 2 " in derived
    graph = graph_of(NAME, steps=2)
    _, log = assert_equal_run(comfyui, spread(graph, **SPLITS[split]), latent_of(graph), timeout=PATIENCE)
    assert "deriving" not in log


def test_a_derived_class_with_a_lora_and_a_batch_gives_the_stock_result(latent_of: LatentOf) -> None:
    plain = graph_of(NAME, steps=2) | {"latent": node("LoadLatent", latent=f"{NAME}-batch.latent")}
    graph = with_lora(plain, NAME, 0.8)
    assert_matters_and_stock(latent_of, plain, graph, ulysses=2, cfg=1)


QUANTISED = [
    ("marks.safetensors", "ulysses 2"),
    ("marks.safetensors", "cfg 2, ulysses 2"),
    ("marks.safetensors", "ulysses 2, streamed"),
    ("old.safetensors", "ring 2, sharded"),
    ("metadata.safetensors", "pipefusion 2"),
    ("nvfp4.safetensors", "ring 2, sharded"),
    ("q8_0.gguf", "ulysses 2"),
    ("q8_0.gguf", "ulysses 2, streamed"),
    ("q4_k.gguf", "ring 2, sharded"),
    ("q4_k.gguf", "pipefusion 2"),
]


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize(("form", "split"), QUANTISED)
def test_a_derived_class_with_a_quantised_file_gives_the_stock_result(
    form: str, split: str, lora: bool, comfyui: ComfyUI, latent_of: LatentOf
) -> None:
    """The LoRA also changes a quantised layer. For GGUF, ComfyUI runs the values that the gguf package itself expands."""
    graph = of_file(f"{NAME}-{form.replace('.gguf', '.safetensors')}")
    graph = with_lora(graph, NAME, 0.8) if lora else graph
    ours = spread(of_file(f"{NAME}-{form}", graph), **SPLITS[split])
    _, log = assert_equal_run(comfyui, ours, latent_of(graph), timeout=PATIENCE)
    assert "deriving" not in log


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("split", ["ulysses 2", "ring 2, sharded", "pipefusion 2"])
def test_a_derived_class_in_a_checkpoint_gives_the_stock_result(
    split: str, lora: bool, comfyui: ComfyUI, latent_of: LatentOf
) -> None:
    graph = graph_of(NAME, steps=2)
    graph["model"] = node("CheckpointLoaderSimple", ckpt_name=f"{NAME}.safetensors")
    ours = spread(graph_of(NAME, steps=2), **SPLITS[split])
    ours["model"] = node("LoadParallelCheckpoint", ckpt_name=f"{NAME}.safetensors", plan=["plan", 0])
    graph, ours = (with_lora(each, NAME, 0.8) if lora else each for each in (graph, ours))
    _, log = assert_equal_run(comfyui, ours, latent_of(graph), timeout=PATIENCE)
    assert "deriving" not in log


@pytest.mark.parametrize("plan", [{"ulysses": 2}, {"pipefusion": 2, "warmup_steps": 99}], ids=str)
def test_the_blocks_of_a_derived_class_are_compiled(
    plan: dict[str, Any], derived: str, comfyui: ComfyUI, latent_of: LatentOf
) -> None:
    """ComfyUI's node compiles the blocks; on CPUs `cudagraphs` runs the same graphs, without a recorder."""
    assert "ulysses 2, compiled " in derived
    graph = insert_after_model(graph_of(NAME, steps=2), "TorchCompileModel", backend="cudagraphs")
    stock = latent_of(graph_of(NAME, steps=2))
    _, log = assert_equal_run(comfyui, spread(graph, cfg=1, **plan), stock, timeout=PATIENCE)
    assert "blocks compiled by cudagraphs" in log
    assert "not compiled" not in log


def test_the_tab_lists_derived_classes(chromium: Browser, comfyui: ComfyUI) -> None:
    with browser.opened(chromium, comfyui) as page:
        page.evaluate("app.extensionManager.command.execute('Workspace.ToggleSidebarTab.parallel')")
        section = page.locator(".pp-on-derived")
        line = section.locator(".pp-finding", has_text="WAN21_CausalAR_T2V")
        expect(line).to_contain_text("the pack worked out how to split one kind of calls: ulysses 2 ")
        expect(section).to_contain_text("New models")


def test_another_kind_of_call_waits_for_its_own_derivation(comfyui: ComfyUI, latent_of: LatentOf) -> None:
    """The known declaration was proved for several frames. A plan that divides the tokens of one frame waits for a new proof."""
    graph = graph_of(NAME, steps=2) | {"latent": node("LoadLatent", latent=f"{NAME}-frame.latent")}
    _, log = assert_equal_run(comfyui, spread(graph, ulysses=2, cfg=1), latent_of(graph), timeout=PATIENCE)
    assert FOUND.search(log)


def test_options_that_need_a_written_declaration_are_refused(comfyui: ComfyUI) -> None:
    graph = graph_of(NAME, steps=2)
    scales = {**dict.fromkeys(("scale_x", "scale_y", "scale_t"), 1.5)}
    shifts = dict.fromkeys(("shift_x", "shift_y", "shift_t"), 0.0)
    graph = insert_after(graph, "model", "ScaleROPE", "model", **scales, **shifts)
    said = refused(comfyui, spread(graph, ulysses=2, cfg=1, strict=False))
    assert said.startswith("WAN21_CausalAR_T2V cannot be run under this plan, because the option rope_options")
