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
from tests.host.test_comfy_refusals import refused
from tests.selection import thorough
from tests.tiny_comfy import save_tiny, save_wide
from tests.tiny_controlnet import save_wan_vae
from tests.tiny_models import draw
from tests.tiny_networks import save_lllite

PLANS: dict[str, dict[str, Any]] = {
    "ulysses 2": {"devices": "cpu:2", "cfg": 1, "ulysses": 2},
    "cfg 2": {"devices": "cpu:2", "cfg": 2},
    "ulysses 2 x ring 2": {"devices": "cpu:4", "cfg": 1, "ulysses": 2, "ring": 2},
    "pp 2": {"devices": "cpu:2", "cfg": 1, "pipefusion": 2, "warmup_steps": 99},
}
ANIMA = "anima"


def anima_graphs(server: ComfyUI) -> tuple[Graph, Graph]:
    """With two networks, one of which ends before the last step and one of which takes a mask, and without."""
    models = server.base_dir / "models"
    save_tiny(models / "diffusion_models", ANIMA)
    save_lllite(models / "model_patches" / "lllite.safetensors")
    save_lllite(models / "model_patches" / "lllite-masked.safetensors", masked=True, seed=1)
    save_lllite(models / "model_patches" / "lllite-narrow.safetensors", width=128)
    noise = torch.randint(0, 256, (9, 14, 3), generator=torch.Generator().manual_seed(0), dtype=torch.uint8).numpy()
    Image.fromarray(noise).resize((112, 72), Image.Resampling.NEAREST).save(server.input_dir / "beside.png")
    graph = graph_of("wan") | {"latent": node("EmptyHunyuanLatentVideo", width=112, height=72, length=1, batch_size=1)}
    graph["model"]["inputs"]["unet_name"] = f"{ANIMA}.safetensors"
    for tokens, side in ((7, "positive"), (4, "negative")):
        save_file({"cond": draw(1, tokens, 1024, seed=tokens)}, server.input_dir / f"{ANIMA}-{side}.safetensors")
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


@pytest.fixture(scope="module")
def anima(comfyui: ComfyUI) -> tuple[Graph, Graph]:
    return anima_graphs(comfyui)


@pytest.mark.parametrize("plan", ["ulysses 2", *(pytest.param(plan, marks=thorough) for plan in [*PLANS][1:])])
def test_lllite_changes_anima_as_on_the_stock_loader(
    latent_of: LatentOf, anima: tuple[Graph, Graph], plan: str
) -> None:
    """With cfg 2 one model call at a time."""
    patched, plain = anima
    strict = plan != "cfg 2"
    if not strict:
        patched = insert_after_model(patched, "RescaleCFG", multiplier=0.7)
    expected = latent_of(patched)
    assert relative_error(latent_of(plain), expected) > DIFFERENT
    assert relative_error(latent_of(spread(patched, strict=strict, **PLANS[plan])), expected) <= TOLERANCE


CHANGED: tuple[tuple[Graph, str], ...] = (
    (
        {"latent": node("EmptyHunyuanLatentVideo", width=112, height=72, length=9, batch_size=1)},
        "Anima LLLite takes a picture and the latent has 3 frames: use a latent of one frame.",
    ),
    (
        {"image": node("RepeatImageBatch", image=["first", 0], amount=2)},
        "the model patch is given a batch of 2 pictures and a parallel MODEL takes one: ",
    ),
    (
        {"lllite": node("ModelPatchLoader", name="lllite-narrow.safetensors")},
        "the model patch is made for a width of 128 and the model has 256: ",
    ),
    (
        {"lllite": node("PackChangedPatch", model_patch=["unchanged", 0])},
        "a model patch that is changed itself cannot be applied to a parallel MODEL: ",
    ),
)
"""What of a graph with networks is changed, and what is said of it."""


def change(patched: Graph, changed: Graph) -> Graph:
    """A graph for the workers; what is replaced has another name there."""
    return spread(patched | {"first": patched["image"], "unchanged": patched["lllite"]} | changed)


@pytest.mark.parametrize(("changed", "said"), CHANGED)
def test_what_a_network_does_not_take_is_refused(
    comfyui: ComfyUI, anima: tuple[Graph, Graph], changed: Graph, said: str
) -> None:
    assert refused(comfyui, change(anima[0], changed)).startswith(said)


QWEN = "wide_qwen"


@thorough
@pytest.mark.parametrize("plan", ["ulysses 2", "cfg 2"])
def test_diffsynth_adds_to_qwen_image_as_on_the_stock_loader(
    comfyui: ComfyUI, latent_of: LatentOf, anima: tuple[Graph, Graph], plan: str
) -> None:
    """On a latent that is not as large as the picture, which is encoded again for it."""
    models = comfyui.base_dir / "models"
    save_wide(models / "diffusion_models", QWEN)
    save_wan_vae(models / "vae" / f"{QWEN}-hint.safetensors")
    plain = anima[1] | {"latent": node("EmptySD3LatentImage", width=96, height=80, batch_size=1)}
    plain["model"] = node("UNETLoader", unet_name=f"{QWEN}.safetensors", weight_dtype="default")
    for tokens, side in ((7, "positive"), (4, "negative")):
        save_file({"cond": draw(1, tokens, 3584, seed=tokens)}, comfyui.input_dir / f"{QWEN}-{side}.safetensors")
        plain[side] = node("LoadConditioning", conditioning=f"{QWEN}-{side}.safetensors")
    beside = {
        "vae": node("VAELoader", vae_name=f"{QWEN}-hint.safetensors"),
        "network": node("PackNetwork", blocks=1),
    }
    given = {"model_patch": ["network", 0], "vae": ["vae", 0], "image": ["image", 0], "strength": 0.7}
    patched = insert_after_model(plain | beside, "QwenImageDiffsynthControlnet", **given)
    expected = latent_of(patched)
    assert relative_error(latent_of(plain), expected) > DIFFERENT
    assert relative_error(latent_of(spread(patched, strict=plan != "cfg 2", **PLANS[plan])), expected) <= TOLERANCE
