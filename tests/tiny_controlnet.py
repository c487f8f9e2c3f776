"""A random FLUX ControlNet in the layout of XLabs, which ComfyUI reads, for the tiny checkpoints."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file

from tests.tiny_flux import CHANNELS, HEAD_DIM, flux_tensors

HINT_WIDTHS = (3, 16, 16, 16, 16, 16, 16, 16)


def save_controlnet(path: Path, *, heads: int = 4, single_blocks: int = 1, seed: int = 0) -> Path:
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
