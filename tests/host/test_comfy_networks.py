"""Model patches that put a network beside the model's blocks: the same picture as on the stock loader."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from scripts.comfyui import ComfyUI
from tests.host.comfy_graphs import DIFFERENT, TOLERANCE, LatentOf, graph_of, spread
from tests.host.conftest import relative_error
from tests.host.graphs import Graph, insert_after_model, node
from tests.selection import thorough
from tests.tiny_comfy import save_wide
from tests.tiny_models import draw
from tests.tiny_networks import save_lllite

PLANS: dict[str, dict[str, Any]] = {
    "ulysses 2": {"devices": "cpu:2", "cfg": 1, "ulysses": 2},
    "cfg 2": {"devices": "cpu:2", "cfg": 2},
    "ulysses 2 x ring 2": {"devices": "cpu:4", "cfg": 1, "ulysses": 2, "ring": 2},
    "pp 2": {"devices": "cpu:2", "cfg": 1, "pipefusion": 2, "warmup_steps": 99},
}
ANIMA = "anima"


@pytest.fixture(scope="module")
def anima(comfyui: ComfyUI) -> tuple[Graph, Graph]:
    """With two networks, one of which ends before the last step and one of which takes a mask, and without."""
    models = comfyui.base_dir / "models"
    save_wide(models / "diffusion_models", ANIMA)
    save_lllite(models / "model_patches" / "lllite.safetensors")
    save_lllite(models / "model_patches" / "lllite-masked.safetensors", masked=True, seed=1)
    noise = torch.randint(0, 256, (9, 14, 3), generator=torch.Generator().manual_seed(0), dtype=torch.uint8).numpy()
    Image.fromarray(noise).resize((112, 72), Image.Resampling.NEAREST).save(comfyui.input_dir / "beside.png")
    graph = graph_of("wan") | {"latent": node("EmptyHunyuanLatentVideo", width=112, height=72, length=1, batch_size=1)}
    graph["model"]["inputs"]["unet_name"] = f"{ANIMA}.safetensors"
    for tokens, side in ((7, "positive"), (4, "negative")):
        save_file({"cond": draw(1, tokens, 1024, seed=tokens)}, comfyui.input_dir / f"{ANIMA}-{side}.safetensors")
        graph[side]["inputs"]["conditioning"] = f"{ANIMA}-{side}.safetensors"
    graph |= {
        "image": node("LoadImage", image="beside.png"),
        "mask": node("ImageToMask", image=["image", 0], channel="red"),
    }
    patched = graph
    for name, given in {"lllite": {"end_percent": 0.6}, "lllite-masked": {"mask": ["mask", 0]}}.items():
        settings = {"strength": 0.8, "start_percent": 0.0, "end_percent": 1.0} | given
        patched = insert_after_model(
            patched, "AnimaLLLiteApply", model_patch=[name, 0], image=["image", 0], **settings
        ) | {name: node("ModelPatchLoader", name=f"{name}.safetensors")}
    return patched, graph


@pytest.mark.parametrize("plan", ["ulysses 2", *(pytest.param(plan, marks=thorough) for plan in [*PLANS][1:])])
def test_lllite_changes_anima_as_on_the_stock_loader(
    latent_of: LatentOf, anima: tuple[Graph, Graph], plan: str
) -> None:
    patched, plain = anima
    expected = latent_of(patched)
    assert relative_error(latent_of(plain), expected) > DIFFERENT
    assert relative_error(latent_of(spread(patched, **PLANS[plan])), expected) <= TOLERANCE
