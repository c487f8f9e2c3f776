"""Random ControlNets in layouts that ComfyUI reads: XLabs' and InstantX's for FLUX, Qwen-Image's, and Stable Diffusion's."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from diffusers import FluxControlNetModel, SD3ControlNetModel
from safetensors.torch import save_file
from torch import Tensor

from tests.support.comfy_oracle import comfy_on_path
from tests.support.tiny.comfyui import save_fp8
from tests.support.tiny.family import HEADS
from tests.support.tiny.flux import CHANNELS, HEAD_DIM, POOLED_WIDTH, TEXT_WIDTH, flux_tensors
from tests.support.tiny.models import randomise

HINT_WIDTHS = (3, 16, 16, 16, 16, 16, 16, 16)


def save_xlabs(path: Path, *, heads: int = 4, single_blocks: int = 1, seed: int = 0) -> Path:
    """Write a ControlNet with one double block and `single_blocks` single blocks."""
    generator = torch.Generator().manual_seed(seed)
    tensors = flux_tensors(heads=heads, single_blocks=single_blocks, seed=seed)
    hidden = heads * HEAD_DIM

    def layer(name: str, *shape: int) -> None:
        width = torch.Size(shape[1:]).numel()
        tensors[f"{name}.weight"] = torch.randn(*shape, generator=generator) / width**0.5
        tensors[f"{name}.bias"] = torch.randn(shape[0], generator=generator) * 0.1

    layer("controlnet_blocks.0", hidden, hidden)
    for index in range(single_blocks):
        layer(f"controlnet_single_blocks.{index}", hidden, hidden)
    layer("pos_embed_input", hidden, 4 * CHANNELS)
    for index, width in enumerate(HINT_WIDTHS):
        layer(f"input_hint_block.{2 * index}", 16, width, 3, 3)
    return _save(path, tensors)


def save_instantx(path: Path, *, heads: int = 4) -> Path:
    """Write a ControlNet of diffusers' class with one double block and one single block. Its hint is a latent."""
    model = FluxControlNetModel(
        in_channels=4 * CHANNELS,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=HEAD_DIM,
        num_attention_heads=heads,
        joint_attention_dim=TEXT_WIDTH,
        pooled_projection_dim=POOLED_WIDTH,
        axes_dims_rope=[16, 56, 56],
    )
    return _save(path, randomise(model, seed=2).state_dict())


def save_qwen(path: Path) -> Path:
    """Write a ControlNet of one block for the wide Qwen-Image, in InstantX's layout. Its hint is a latent."""
    comfy_on_path()
    from comfy.ldm.qwen_image.controlnet import QwenImageControlNetModel
    from comfy.ops import disable_weight_init

    settings = {"dtype": torch.float32, "device": "meta", "operations": disable_weight_init}
    return save_fp8(path, QwenImageControlNetModel(num_layers=1, **settings), seed=4)


def save_sd3(path: Path) -> Path:
    """Write a ControlNet of diffusers' class with one block for the tiny SD 3. Its hint is a latent."""
    model = SD3ControlNetModel(
        sample_size=16,
        num_layers=1,
        attention_head_dim=64,
        num_attention_heads=HEADS,
        joint_attention_dim=4096,
        caption_projection_dim=HEADS * 64,
        pooled_projection_dim=2048,
        pos_embed_max_size=8,
    )
    return _save(path, randomise(model, seed=5).state_dict())


def save_wan_vae(path: Path) -> Path:
    """Write Qwen-Image's VAE with few channels. The class is Wan's."""
    comfy_on_path()
    from comfy.ldm.wan.vae import WanVAE

    model = WanVAE(dim=4, z_dim=16, temperal_downsample=[False, True, True])
    return _save(path, randomise(model, seed=6).state_dict())


SD15: Mapping[str, Any] = {
    "transformer_depth": [1, 1], "transformer_depth_middle": 1, "context_dim": 768, "num_heads": 8, "num_head_channels": -1,
}  # fmt: skip
SDXL: Mapping[str, Any] = {
    "transformer_depth": [0, 2, 5], "transformer_depth_middle": -1, "context_dim": 2048, "num_heads": -1,
    "num_head_channels": 64, "use_linear_in_transformer": True, "num_classes": "sequential", "adm_in_channels": 2816,
}  # fmt: skip
"""Sizes of ControlNets for the UNets of these names in tests.support.tiny.comfyui."""


def save_of_unet(path: Path, sizes: Mapping[str, Any] = SD15) -> Path:
    """Write a ControlNet for a UNet, in ComfyUI's own layout. Its hint is the picture."""
    comfy_on_path()
    import comfy.ops
    from comfy.cldm.cldm import ControlNet

    scales = len(sizes["transformer_depth"])
    model = ControlNet(
        image_size=32, use_checkpoint=False, use_spatial_transformer=True, legacy=False, in_channels=4, hint_channels=3,
        model_channels=320, num_res_blocks=[1] * scales, channel_mult=(1,) * scales, dtype=torch.float32, device="cpu",
        operations=comfy.ops.disable_weight_init, **sizes,
    )  # fmt: skip
    tensors = randomise(model, seed=8).state_dict()
    return _save(path, {f"control_model.{key}": tensor.contiguous() for key, tensor in tensors.items()})


def save_t2i_adapter(path: Path) -> Path:
    """Write a light T2I adapter for Stable Diffusion 1.5, which ComfyUI loads as a ControlNet."""
    comfy_on_path()
    from comfy.t2i_adapter.adapter import Adapter_light

    model = Adapter_light(cin=192, channels=[320, 640, 1280, 1280], nums_rb=4)
    return _save(path, randomise(model, seed=9).state_dict())


def _save(path: Path, tensors: dict[str, Tensor]) -> Path:
    path.parent.mkdir(exist_ok=True)
    save_file(tensors, path)
    return path
