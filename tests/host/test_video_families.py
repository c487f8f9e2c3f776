"""ComfyUI's own video models through Load Parallel Diffusion Model, against the stock loader in the same ComfyUI."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from scripts.comfyui import ComfyUI
from tests.comfy_oracle import comfy_on_path
from tests.host.comfy_graphs import PLANS, TOKENS, TOLERANCE, graph_of, save_latent, spread, with_guides
from tests.host.conftest import relative_error
from tests.host.graphs import Graph, node, step_by_step
from tests.selection import thorough
from tests.tiny_models import draw, randomise

HEADS, TEXT = 3, 48
LTXV: Mapping[str, Any] = {
    "num_attention_heads": HEADS,
    "attention_head_dim": 32,
    "cross_attention_dim": HEADS * 32,
    "caption_channels": TEXT,
    "num_layers": 2,
    "causal_temporal_positioning": True,
}
LATENTS = {
    "ltxv": node("EmptyLTXVLatentVideo", width=160, height=128, length=17, batch_size=1),
    "hunyuan15": node("EmptyHunyuanVideo15Latent", width=80, height=64, length=9, batch_size=1),
}


def hunyuan15(**settings: Any) -> Any:
    """HunyuanVideo 1.5, which has double blocks alone."""
    comfy_on_path()
    import comfy.ops
    from comfy.ldm.hunyuan_video.model import HunyuanVideo

    sizes: dict[str, Any] = {"in_channels": 65, "meanflow": False} | settings
    return HunyuanVideo(
        out_channels=32, vec_in_dim=None, context_in_dim=TEXT, hidden_size=HEADS * 128, mlp_ratio=4.0,
        num_heads=HEADS, depth=2, depth_single_blocks=0, axes_dim=[16, 56, 56], theta=256, patch_size=[1, 1, 1],
        qkv_bias=True, guidance_embed=False, byt5=True, use_cond_type_embedding=True,
        vision_in_dim=1152, meanflow_sum=True, dtype=torch.float32, device="cpu", operations=comfy.ops.disable_weight_init,
        **sizes,
    )  # fmt: skip


def refiner() -> Any:
    """HunyuanImage 2.1's, which is given the picture to refine beside the latent."""
    comfy_on_path()
    import comfy.ops
    from comfy.ldm.hunyuan_video.model import HunyuanVideo

    return HunyuanVideo(
        in_channels=128, out_channels=64, vec_in_dim=None, context_in_dim=TEXT, hidden_size=HEADS * 128, mlp_ratio=4.0,
        num_heads=HEADS, depth=1, depth_single_blocks=2, axes_dim=[16, 56, 56], theta=256, patch_size=[1, 1, 1],
        qkv_bias=True, guidance_embed=False, byt5=False, meanflow=False, use_cond_type_embedding=False, vision_in_dim=None,
        meanflow_sum=False, dtype=torch.float32, device="cpu", operations=comfy.ops.disable_weight_init,
    )  # fmt: skip


def ltxv() -> Any:
    """LTX-Video."""
    comfy_on_path()
    import comfy.ops
    from comfy.ldm.lightricks.model import LTXVModel

    return LTXVModel(**LTXV, dtype=torch.float32, device="cpu", operations=comfy.ops.disable_weight_init)


def save(folder: Path, name: str, model: Any, **config: Any) -> None:
    """Write a model, its configuration in the header as LTX-Video's files have it."""
    randomise(model, seed=len(name))
    metadata = {"config": json.dumps({"transformer": config})} if config else None
    tensors = {key: tensor.contiguous() for key, tensor in model.state_dict().items()}
    save_file(tensors, folder / f"{name}.safetensors", metadata)


@pytest.fixture(scope="module", autouse=True)
def _files(comfyui: ComfyUI) -> None:
    folder = comfyui.base_dir / "models" / "diffusion_models"
    save(folder, "ltxv", ltxv(), **LTXV)
    save(folder, "hunyuan15", hunyuan15())
    for side, tokens in TOKENS.items():
        mask = torch.ones(1, tokens, dtype=torch.int64)
        mask[:, -2:] = 0
        prompt = {
            "cond": draw(1, tokens, TEXT, seed=tokens),
            "pooled_output": draw(1, 768, seed=1),
            "attention_mask": mask,
        }
        save_file(prompt, comfyui.input_dir / f"video-{side}.safetensors")


def video(name: str) -> Graph:
    """The stock loader and KSampler."""
    graph = graph_of("wan")
    prompts = {side: node("LoadConditioning", conditioning=f"video-{side}.safetensors") for side in TOKENS}
    loader = node("UNETLoader", unet_name=f"{name}.safetensors", weight_dtype="default")
    return graph | prompts | {"model": loader, "latent": LATENTS[name]}


@pytest.mark.parametrize(
    ("name", "plan"),
    [
        ("ltxv", {"devices": "cpu:2"}),
        ("hunyuan15", {"devices": "cpu:2"}),
        ("hunyuan15", {"devices": "cpu:2", "pipefusion": 2, "warmup_steps": 99}),
    ],
)
def test_the_stock_result(name: str, plan: dict[str, Any], latent_of: Callable[[Graph], Tensor]) -> None:
    """Text is masked; the first has what its file's header says, the second no single blocks."""
    graph = video(name)
    assert relative_error(latent_of(spread(graph, **plan)), latent_of(graph)) <= TOLERANCE


def test_image_to_video(latent_of: Callable[[Graph], Tensor]) -> None:
    """LTX-Video keeps what is outside a mask, and has a timestep for each token."""
    graph = video("ltxv") | {
        "solid": node("SolidMask", value=1.0, width=160, height=128),
        "mask": node("FeatherMask", mask=["solid", 0], left=128, top=0, right=0, bottom=0),
        "masked": node("SetLatentNoiseMask", samples=["latent", 0], mask=["mask", 0]),
    }
    graph["sampler"]["inputs"]["latent_image"] = ["masked", 0]
    stock = latent_of(graph)
    assert relative_error(latent_of(video("ltxv")), stock) > 0.01
    assert relative_error(latent_of(spread(graph)), stock) <= TOLERANCE


@thorough
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("strength", [1.0, 0.7])
def test_guides(comfyui: ComfyUI, strength: float, plan: dict[str, Any], latent_of: Callable[[Graph], Tensor]) -> None:
    """LTX-Video's: one of less strength weighs attention between its tokens and the video's."""
    graph = with_guides(comfyui, video("ltxv"), "latent", strength=strength)
    assert relative_error(latent_of(spread(graph, **plan)), latent_of(graph)) <= TOLERANCE


def test_meanflow(comfyui: ComfyUI, latent_of: Callable[[Graph], Tensor]) -> None:
    """HunyuanVideo 1.5's super-resolution reads the next step's sigma: in the loop, and with one forward a call."""
    save(comfyui.base_dir / "models" / "diffusion_models", "meanflow", hunyuan15(in_channels=98, meanflow=True))
    graph = video("hunyuan15")
    graph["model"]["inputs"]["unet_name"] = "meanflow.safetensors"
    assert (
        relative_error(latent_of(spread(graph, "cpu:2", pipefusion=2, warmup_steps=99)), latent_of(graph)) <= TOLERANCE
    )
    stepwise = step_by_step(graph)
    assert relative_error(latent_of(spread(stepwise, strict=False)), latent_of(stepwise)) <= TOLERANCE


@thorough
@pytest.mark.parametrize(
    "plan",
    [
        {"devices": "cpu:2", "ulysses": 2},
        {"devices": "cpu:2", "cfg": 2},
        {"devices": "cpu:3", "ring": 3, "weights": "sharded"},
        {"devices": "cpu:4", "ulysses": 2, "ring": 2},
        {"devices": "cpu:2", "pipefusion": 2, "warmup_steps": 99},
    ],
)
def test_a_picture_is_refined(comfyui: ComfyUI, plan: dict[str, Any], latent_of: Callable[[Graph], Tensor]) -> None:
    """By HunyuanImage 2.1's second model."""
    save(comfyui.base_dir / "models" / "diffusion_models", "refiner", refiner())
    save_latent(comfyui, "to-refine", 1, 32, 1, 8, 10)
    graph = video("hunyuan15") | {"latent": node("LoadLatent", latent="to-refine.latent")}
    graph["model"]["inputs"]["unet_name"] = "refiner.safetensors"
    sides = {side: [side, 0] for side in TOKENS}
    graph["refine"] = node("HunyuanRefinerLatent", **sides, latent=["latent", 0], noise_augmentation=0.1)
    graph["sampler"]["inputs"] |= {"positive": ["refine", 0], "negative": ["refine", 1], "latent_image": ["refine", 2]}
    assert relative_error(latent_of(spread(graph, **plan)), latent_of(graph)) <= TOLERANCE
