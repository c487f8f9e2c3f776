"""Unsharded sound: ACE-Step, small in a copy of ComfyUI that reads sizes from a file, and Stable Audio as a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from scripts.comfyui import ComfyUI
from tests.support.copies.sized import sized_copy
from tests.support.graphs.comfyui import TOLERANCE, LatentOf, graph_of, save_latent, spread
from tests.support.graphs.family_checks import assert_stock
from tests.support.graphs.family_tests import job, save_with_prompts
from tests.support.graphs.flux import Graph, node
from tests.support.graphs.unsharded import SPLITS
from tests.support.latents import relative_error
from tests.support.selection import thorough
from tests.support.tiny.models import draw

pytestmark = thorough


@pytest.fixture(scope="module")
def comfyui(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ComfyUI]:
    """Start the copy of ComfyUI, with the models and their prompts."""
    folder = tmp_path_factory.mktemp("whole-sized")
    server = sized_copy(folder)
    fill(server)
    with server:
        yield server


def fill(server: ComfyUI) -> None:
    """Write the models, prompts and latents."""
    save_with_prompts(server, "ace")
    save_latent(server, "ace", 2, 8, 16, 24)
    save_with_prompts(server, "stable_audio")
    save_latent(server, "stable_audio", 2, 64, 37)
    models = server.base_dir / "models"
    tensors = load_file(models / "diffusion_models" / "stable_audio.safetensors")
    full = {f"model.model.{name}": tensor for name, tensor in tensors.items()}
    for number, which in enumerate(("start", "total")):
        embedder = f"conditioner.conditioners.seconds_{which}.embedder.embedding"
        full[f"{embedder}.0.weights"] = draw(128, seed=number)
        full[f"{embedder}.1.weight"] = draw(768, 257, seed=number + 2) / 16
        full[f"{embedder}.1.bias"] = torch.zeros(768)
    (models / "checkpoints").mkdir(exist_ok=True)
    save_file(full, models / "checkpoints" / "stable_audio.safetensors")


@pytest.mark.parametrize("split", SPLITS.values(), ids=SPLITS)
def test_ace_step_gives_the_stock_result(split: dict[str, Any], latent_of: LatentOf) -> None:
    graph = job("ace")
    assert_stock(latent_of, graph, strict=False, **split)


@pytest.mark.parametrize("split", SPLITS.values(), ids=SPLITS)
def test_stable_audio_gives_the_stock_result(split: dict[str, Any], latent_of: LatentOf) -> None:
    graph = graph_of("stable_audio", steps=2)
    graph["model"] = node("CheckpointLoaderSimple", ckpt_name="stable_audio.safetensors")
    ours: Graph = spread(graph, strict=False, **split)
    ours["model"] = node("LoadParallelCheckpoint", ckpt_name="stable_audio.safetensors", plan=["plan", 0])
    assert relative_error(latent_of(ours), latent_of(graph)) <= TOLERANCE
