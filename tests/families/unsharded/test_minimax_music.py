"""MiniMax Music 3, unsharded, with small widths in a copy of a ComfyUI that has the class: the stock result under each split."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from scripts.comfyui import ComfyUI
from tests.support.comfy_oracle import comfy_on_path
from tests.support.comfyuis import only_in_newer
from tests.support.copies.sized import sized_copy
from tests.support.graphs.comfyui import DIFFERENT, LatentOf, graph_of, save_latent, spread
from tests.support.graphs.family_checks import assert_matters_and_stock, assert_stock
from tests.support.graphs.family_tests import save_lora_of
from tests.support.graphs.flux import Graph, insert_after, node
from tests.support.graphs.loras import with_lora
from tests.support.graphs.unsharded import SPLITS
from tests.support.latents import relative_error
from tests.support.selection import thorough
from tests.support.tiny.models import draw

pytestmark = thorough

NAME = "music"
DIT = "comfy/ldm/minimax_music/dit.py"
WIDTHS: Mapping[int, int] = {2304: 384, 2048: 128, 8192: 256, 4096: 32, 36: 2}
"""Numbers in the class's source, and the copy's numbers: input, width, feed-forward, a layer of text, blocks."""

JOINED: Mapping[int, int] = {3 * width: 3 * small for width, small in WIDTHS.items()} | {2 * 8192: 2 * 256}
LAYER = "diffusion_transformer.transformer.layers.1.self_attn.to_qkv"

FRAMES = {
    "of one length": {"positive": 8, "negative": 8},
    "of which ComfyUI repeats one": {"positive": 8, "negative": 4},
    "of two lengths": {"positive": 7, "negative": 4},
    "longer than a window": {"positive": 210, "negative": 210},
}
"""Frames of sound of each prompt; a window has 200."""


@pytest.fixture(scope="module")
def comfyui(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ComfyUI]:
    """Start the copy of ComfyUI, with the model and its prompts."""
    comfy_on_path()
    only_in_newer("MiniMaxMusic3", find_spec("comfy.ldm.minimax_music") is not None)
    server = sized_copy(tmp_path_factory.mktemp("music"))
    narrow(server.comfyui / DIT)
    save_model(server.base_dir / "models" / "diffusion_models" / f"{NAME}.safetensors")
    for side, frames in {(side, count) for sides in FRAMES.values() for side, count in sides.items()}:
        save_prompt(server, side, frames)
    save_latent(server, f"{NAME}-short", 3, 128, 30)
    save_latent(server, f"{NAME}-long", 2, 128, 720)
    with server:
        yield server


def narrow(file: Path) -> None:
    """Replace the numbers in the class's source by the small widths."""
    text = file.read_text()
    for width, small in WIDTHS.items():
        text, found = re.subn(rf"\b{width}\b", str(small), text)
        assert found, f"{DIT} of this ComfyUI has no {width}"
    file.write_text(text)


def save_model(path: Path) -> None:
    """Write random weights for the class."""
    import comfy.ops
    from comfy.ldm.minimax_music.dit import MiniMaxMusic3DiT

    sizes = {**WIDTHS, **JOINED}
    made = MiniMaxMusic3DiT(dtype=torch.float32, device="meta", operations=comfy.ops.disable_weight_init)
    tensors = {}
    for seed, (key, tensor) in enumerate(made.state_dict().items()):
        if (block := re.search(r"layers\.(\d+)\.", key)) and int(block[1]) >= WIDTHS[36]:
            continue
        shape = [sizes.get(size, size) for size in tensor.shape]
        values = draw(*shape, seed=seed)
        tensors[key] = 1 + 0.1 * values if key.endswith("gamma") else values / max(1, shape[-1]) ** 0.5
    save_file(tensors, path)


def save_prompt(server: ComfyUI, side: str, frames: int) -> None:
    """Write a text of `frames` frames of sound, and a file with its strength."""
    seed = frames + len(side)
    text = {"cond": draw(1, frames, 8 * WIDTHS[4096], seed=seed)}
    save_file(text, server.input_dir / f"{NAME}-{side}-{frames}.safetensors")
    strength = {"conditioning_scale": torch.full((1, 1, 1), 1 + seed / 100)}
    save_file(strength, server.input_dir / f"{NAME}-{side}-{frames}-beside.safetensors")


def song(frames: Mapping[str, int]) -> Graph:
    """Return the model's graph for a batch, with the stock loader."""
    graph = graph_of(NAME, steps=2)
    long = max(frames.values()) > 200
    graph["latent"] = node("LoadLatent", latent=f"{NAME}-{'long' if long else 'short'}.latent")
    for side, count in frames.items():
        name = f"{NAME}-{side}-{count}"
        graph[side] = node("LoadConditioning", conditioning=f"{name}.safetensors")
        graph = insert_after(graph, side, "PackPrompt", "conditioning", file=f"{name}-beside.safetensors")
    return graph


@pytest.mark.parametrize("split", SPLITS.values(), ids=SPLITS)
@pytest.mark.parametrize("frames", FRAMES.values(), ids=FRAMES)
def test_every_split_gives_the_stock_result(
    frames: Mapping[str, int], split: dict[str, Any], latent_of: LatentOf
) -> None:
    graph = song(frames)
    assert_stock(latent_of, graph, strict=False, **split)


def test_a_lora_gives_the_stock_result(comfyui: ComfyUI, latent_of: LatentOf) -> None:
    save_lora_of(comfyui, NAME, (LAYER,))
    plain = song(FRAMES["of one length"])
    graph = with_lora(plain, NAME, 0.8)
    assert_matters_and_stock(latent_of, plain, graph, strict=False, cfg=2)


def test_the_prompts_strength_changes_the_latent(latent_of: LatentOf) -> None:
    """The strength reaches the model, which a comparison of equal graphs alone would not show."""
    graph = song(FRAMES["of one length"])
    other = copy.deepcopy(graph)
    other["PackPrompt after positive"]["inputs"]["file"] = f"{NAME}-positive-210-beside.safetensors"
    assert relative_error(latent_of(spread(other, strict=False, cfg=2)), latent_of(graph)) > DIFFERENT
