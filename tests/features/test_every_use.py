"""Common uses of every family, a LoRA, a mask, image to image and a batch, in one graph, against ComfyUI's own loader."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from scripts.comfyui import ComfyUI
from tests.support.graphs.comfyui import TOKENS, TOLERANCE, LatentOf, graph_of, save_families, save_latent, spread
from tests.support.graphs.comfyui_inputs import MATTERS, TEXT
from tests.support.graphs.flux import Graph, insert_after, node
from tests.support.graphs.loras import LORA, save_lora, with_lora
from tests.support.latents import relative_error
from tests.support.selection import thorough
from tests.support.tiny.comfyui import TINY, save_wide
from tests.support.tiny.models import draw

pytestmark = thorough

WAN = ("wan", "wan_i2v", "wan22_5b", "vace")
LAYERS: Mapping[str, tuple[str, ...]] = {
    "flux2": LORA["flux2"],
    **dict.fromkeys(WAN, LORA["wan"]),
    "wide_qwen": (
        "diffusion_model.transformer_blocks.0.attn.to_q",
        "diffusion_model.transformer_blocks.0.attn.add_k_proj",
        "diffusion_model.img_in",
    ),
    "wide_z_image": (
        "diffusion_model.layers.0.attention.qkv",
        "diffusion_model.layers.0.feed_forward.w2",
        "diffusion_model.noise_refiner.0.attention.out",
    ),
    "wide_chroma": (
        "diffusion_model.double_blocks.0.img_attn.qkv",
        "diffusion_model.double_blocks.0.txt_mlp.0",
        "diffusion_model.single_blocks.0.linear1",
        "diffusion_model.img_in",
    ),
}
"""Layers that a LoRA changes, including fused ones where the family has them."""

LATENT: Mapping[str, tuple[int, ...]] = {name: TINY[name].latent for name in ("flux2", *WAN)} | dict.fromkeys(
    TEXT, (16, 10, 14)
)
PLANS: tuple[dict[str, Any], ...] = ({"devices": "cpu:2"}, {"devices": "cpu:2", "ring": 2, "weights": "sharded"})


@pytest.fixture(scope="module", autouse=True)
def _files(comfyui: ComfyUI) -> None:
    models = comfyui.base_dir / "models"
    save_families(comfyui, "flux2", *WAN)
    for name, width in TEXT.items():
        save_wide(models / "diffusion_models", name)
        for side, tokens in TOKENS.items():
            save_file({"cond": draw(1, tokens, width, seed=tokens)}, comfyui.input_dir / f"{name}-{side}.safetensors")
    for name, layers in LAYERS.items():
        save_latent(comfyui, name, 1, *LATENT[name])
        tensors = load_file(models / "diffusion_models" / f"{name}.safetensors")
        save_lora(models / "loras" / f"{name}-lora.safetensors", layers, tensors)


def job(name: str) -> Graph:
    """Return the graph of a family that denoises from pure noise."""
    of = name if name in TINY else "wan"
    graph = graph_of(of, steps=2)
    graph["model"]["inputs"]["unet_name"] = f"{name}.safetensors"
    for side in TOKENS:
        graph[side]["inputs"]["conditioning"] = f"{name}-{side}.safetensors"
    return graph | {"latent": node("LoadLatent", latent=f"{name}.latent")}


def used(name: str, strength: float = 0.8, right: float = 0.0) -> Graph:
    """Return the graph with a LoRA of this strength that denoises a batch of two latents by half, with a mask.

    The mask is 1 in the left half, and `right` in the other.
    """
    *_, height, width = LATENT[name]
    graph = insert_after(with_lora(job(name), name, strength), "latent", "RepeatLatentBatch", "samples", amount=2)
    graph = insert_after(graph, "latent", "SetLatentNoiseMask", "samples", mask=["mask", 0])
    graph["sampler"]["inputs"]["denoise"] = 0.5
    return graph | {
        "left": node("SolidMask", value=1.0, width=8 * (width // 2), height=8 * height),
        "right": node("SolidMask", value=right, width=8 * width, height=8 * height),
        "mask": node("MaskComposite", destination=["right", 0], source=["left", 0], x=0, y=0, operation="or"),
    }


@pytest.mark.parametrize("plan", PLANS, ids=["exact", "sharded"])
@pytest.mark.parametrize("name", LAYERS)
def test_every_use_gives_the_stock_result(name: str, plan: dict[str, Any], latent_of: LatentOf) -> None:
    graph = used(name)
    stock = latent_of(graph)
    for unused in (used(name, strength=0.0), used(name, right=1.0)):
        assert relative_error(latent_of(unused), stock) > MATTERS
    assert relative_error(latent_of(spread(graph, **plan)), stock) <= TOLERANCE
