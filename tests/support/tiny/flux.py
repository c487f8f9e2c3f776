"""Random FLUX checkpoints small enough for two CPU cores, with Black Forest Labs' tensor names."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from parallel_backend.models.comfyui.reduced import repeated

HEAD_DIM = 128
TEXT_WIDTH = 64
POOLED_WIDTH = 32
CHANNELS = 16


def flux_tensors(
    *,
    heads: int = 4,
    double_blocks: int = 1,
    single_blocks: int = 2,
    guidance: bool = False,
    dtype: torch.dtype = torch.float32,
    prefix: str = "",
    norm_scale: str = "scale",
    channels: int = CHANNELS,
    seed: int = 0,
) -> dict[str, Tensor]:
    """Return a checkpoint's tensors. Weights are scaled so that activations stay near 1 and every part matters.

    Args:
        prefix: the prefix of all names.
        norm_scale: the end of the names of the norms' scales ("weight" in files of ComfyUI's).
        channels: channels that are embedded (96 for Fill).
    """
    generator = torch.Generator().manual_seed(seed)
    h = heads * HEAD_DIM
    tensors: dict[str, Tensor] = {}

    def linear(name: str, width_in: int, width_out: int, gain: float = 1.0) -> None:
        tensors[f"{name}.weight"] = repeated((width_out, width_in), generator) * gain / width_in**0.5
        tensors[f"{name}.bias"] = torch.randn(width_out, generator=generator) * 0.1

    def norms(name: str) -> None:
        for part in ("query_norm", "key_norm"):
            tensors[f"{name}.{part}.{norm_scale}"] = 1 + 0.2 * torch.randn(HEAD_DIM, generator=generator)

    linear("img_in", 4 * channels, h)
    linear("txt_in", TEXT_WIDTH, h)
    for name, width in [("time_in", 256), ("vector_in", POOLED_WIDTH)] + [("guidance_in", 256)] * guidance:
        linear(f"{name}.in_layer", width, h)
        linear(f"{name}.out_layer", h, h)
    for i in range(double_blocks):
        for stream in ("img", "txt"):
            block = f"double_blocks.{i}.{stream}"
            linear(f"{block}_mod.lin", h, 6 * h, gain=0.5)
            linear(f"{block}_attn.qkv", h, 3 * h)
            norms(f"{block}_attn.norm")
            linear(f"{block}_attn.proj", h, h)
            linear(f"{block}_mlp.0", h, 4 * h)
            linear(f"{block}_mlp.2", 4 * h, h)
    for i in range(single_blocks):
        block = f"single_blocks.{i}"
        linear(f"{block}.modulation.lin", h, 3 * h, gain=0.5)
        linear(f"{block}.linear1", h, 7 * h)
        linear(f"{block}.linear2", 5 * h, h)
        norms(f"{block}.norm")
    linear("final_layer.adaLN_modulation.1", h, 2 * h, gain=0.5)
    linear("final_layer.linear", h, 4 * CHANNELS)
    return {prefix + name: tensor.to(dtype).contiguous() for name, tensor in tensors.items()}


def save_flux(path: Path, **settings: object) -> Path:
    """Write a checkpoint with the settings of `flux_tensors`."""
    save_file(flux_tensors(**settings), path)  # type: ignore[arg-type]
    return path


def save_conditioning(
    path: Path, tokens: int, *, batch: int = 1, width: int = TEXT_WIDTH, pooled_width: int = POOLED_WIDTH, seed: int = 0
) -> Path:
    """Write a random prompt of `tokens` text tokens for LoadConditioning."""
    generator = torch.Generator().manual_seed(1000 * seed + tokens)
    save_file(
        {
            "cond": torch.randn(batch, tokens, width, generator=generator),
            "pooled_output": torch.randn(batch, pooled_width, generator=generator),
        },
        path,
    )
    return path
