"""Classes without a written declaration: a real ComfyUI derives one from a graph's calls, and gives the stock result.

The classes are HunyuanDiT and ComfyUI's CogVideoX, and an invented class in a copy of ComfyUI.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file

from scripts.comfyui import ComfyUI
from tests.support.comfy_oracle import comfy_on_path
from tests.support.copies.sized import sized_copy
from tests.support.graphs.comfyui import DIFFERENT, TOKENS, TOLERANCE, LatentOf, graph_of, save_latent, spread
from tests.support.graphs.derived import FINDING, FOUND, PATIENCE, own_cache
from tests.support.graphs.family_tests import save_with_loras
from tests.support.graphs.flux import Graph, insert_after
from tests.support.graphs.loras import with_lora
from tests.support.latents import latents, relative_error, saved_latent
from tests.support.selection import thorough
from tests.support.tiny.models import draw, randomise
from tests.support.unheard.copy import comfyui_with_it

pytestmark = thorough

LAYERS = {
    "hunyuan_dit": ("blocks.1.attn1.Wqkv", "blocks.0.mlp.fc1"),
    "cogvideox_inpaint": ("blocks.1.q", "blocks.0.ff_proj"),
}
BESIDE = {"cogvideox_inpaint": {"concat_latent_image": draw(1, 32, 3, 8, 10, seed=7)}}
"""Tensors that CogVideoX's own node adds to both prompts."""

SPLITS: Mapping[str, dict[str, Any]] = {
    "ulysses 2": {"cfg": 1, "ulysses": 2},
    "ring 3, sharded": {"devices": "cpu:3", "cfg": 1, "ring": 3, "weights": "sharded"},
    "cfg 2 x ulysses 2": {"devices": "cpu:4", "cfg": 2, "ulysses": 2},
    "pipefusion 2": {"cfg": 1, "pipefusion": 2, "warmup_steps": 99},
}


@pytest.fixture(scope="module")
def comfyui(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ComfyUI]:
    """Start a copy of ComfyUI that reads sizes from files, and has derived no declaration yet."""
    folder = tmp_path_factory.mktemp("undeclared")
    server = sized_copy(folder)
    server.env |= own_cache(folder)
    save_with_loras(server, LAYERS)
    for name, given in BESIDE.items():
        save_file(given, server.input_dir / f"{name}-given.safetensors")
    with server:
        yield server


def job(name: str, given: str = "") -> Graph:
    """Return the graph of a class, with the further tensors of its prompts, from the file `given` if it is named."""
    graph = graph_of(name, steps=2)
    for side in TOKENS:
        file = given or (f"{name}-given.safetensors" if name in BESIDE else f"{name}-beside-{side}.safetensors")
        graph = insert_after(graph, side, "PackPrompt", "conditioning", file=file)
    return graph


def test_cancel_ends_the_wait_and_the_next_prompt_waits_again(comfyui: ComfyUI, latent_of: LatentOf) -> None:
    """HunyuanDiT has two kinds of calls, because a mask hides a part of one branch's text."""
    graph = job("hunyuan_dit")
    ours = spread(graph, strict=False, ulysses=2, cfg=1)
    cancelled = comfyui.queue(ours, on_text=lambda told: told.text == FINDING and comfyui.interrupt(), timeout=PATIENCE)
    assert cancelled.status == "interrupted"
    assert not FOUND.search(comfyui.log)
    run = comfyui.queue(ours, timeout=PATIENCE).check()
    assert relative_error(saved_latent(comfyui, run), latent_of(graph)) <= TOLERANCE
    assert FOUND.search(comfyui.log)


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("name", LAYERS)
def test_a_derived_class_gives_the_stock_result(name: str, split: str, comfyui: ComfyUI, latent_of: LatentOf) -> None:
    graph = job(name)
    run = comfyui.queue(spread(graph, strict=False, **SPLITS[split]), timeout=PATIENCE)
    assert relative_error(saved_latent(comfyui, run.check()), latent_of(graph)) <= TOLERANCE


@pytest.mark.parametrize("name", LAYERS)
def test_a_derived_class_with_a_lora_gives_the_stock_result(name: str, comfyui: ComfyUI, latent_of: LatentOf) -> None:
    plain = job(name)
    graph = with_lora(plain, name, 0.8)
    assert relative_error(latent_of(plain), latent_of(graph)) > DIFFERENT
    run = comfyui.queue(spread(graph, strict=False, **SPLITS["ring 3, sharded"]), timeout=PATIENCE)
    assert relative_error(saved_latent(comfyui, run.check()), latent_of(graph)) <= TOLERANCE


FRAMES, HEIGHT, WIDTH = 5, 8, 12
SIZES = {"width": 96, "heads": 3, "text_width": 48, "depth": 5, "every": 2}


def save_unheard(server: ComfyUI) -> None:
    """Save the invented model's file, a latent, prompts, and their further inputs: hints and sounds of two seeds."""
    comfy_on_path()
    from tests.support.unheard.model import Unheard

    folder = server.base_dir / "models" / "diffusion_models"
    folder.mkdir(parents=True, exist_ok=True)
    tensors = randomise(Unheard(**SIZES), seed=3).state_dict()
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "unheard.safetensors")
    save_latent(server, "unheard", 1, 16, FRAMES, HEIGHT, WIDTH)
    for side, tokens in TOKENS.items():
        text = {"cond": draw(1, tokens, SIZES["text_width"], seed=tokens)}
        save_file(text, server.input_dir / f"unheard-{side}.safetensors")
    for seed in (1, 2):
        given = {"hint": draw(1, 16, FRAMES, HEIGHT, WIDTH, seed=seed), "sound": draw(1, FRAMES, 4, 24, seed=10 * seed)}
        save_file(given, server.input_dir / f"given-{seed}.safetensors")


def test_an_invented_class_runs_on_several_workers(tmp_path: Path) -> None:
    server = comfyui_with_it(tmp_path)
    server.env |= own_cache(tmp_path)
    save_unheard(server)
    graph = job("unheard", "given-1.safetensors")
    first, *others = SPLITS.values()
    with server:
        latent_of = latents(server)
        stock = latent_of(graph)
        assert relative_error(latent_of(job("unheard", "given-2.safetensors")), stock) > DIFFERENT
        run = server.queue(spread(graph, strict=False, **first), timeout=PATIENCE).check()
        found = FOUND.search(server.log)
        assert found is not None and found[1] == "Unheard"
        assert "3 patches over 2 stages" in found[2]
        assert relative_error(saved_latent(server, run), stock) <= TOLERANCE
        for split in others:
            run = server.queue(spread(graph, **split), timeout=PATIENCE).check()
            assert relative_error(saved_latent(server, run), stock) <= TOLERANCE, split
        assert len(FOUND.findall(server.log)) == 1
