"""Random FLUX ControlNets in two layouts that ComfyUI reads, of XLabs and of InstantX, for the tiny checkpoints."""

from __future__ import annotations

from pathlib import Path

import torch
from diffusers import FluxControlNetModel
from safetensors.torch import save_file

from tests.tiny_flux import CHANNELS, HEAD_DIM, POOLED_WIDTH, TEXT_WIDTH, flux_tensors
from tests.tiny_models import randomise

HINT_WIDTHS = (3, 16, 16, 16, 16, 16, 16, 16)


def save_xlabs(path: Path, *, heads: int = 4, single_blocks: int = 1, seed: int = 0) -> Path:
    """Write a ControlNet with one double block and `single_blocks` single ones."""
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
    path.parent.mkdir(exist_ok=True)
    save_file(tensors, path)
    return path


def save_instantx(path: Path, *, heads: int = 4) -> Path:
    """Write a ControlNet of diffusers' class with one double and one single block; its hint is a latent."""
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
    path.parent.mkdir(exist_ok=True)
    save_file(randomise(model, seed=2).state_dict(), path)
    return path
