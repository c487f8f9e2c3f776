"""Models at their full size, as files of which only the header is there, and what a denoise of each is given."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

SETTINGS = {"dtype": torch.bfloat16, "device": "meta"}


@dataclass(frozen=True)
class Job:
    """A model and one denoise.

    `make` gets ComfyUI's layers; `latent` is the shape without the batch; `prompt` the shapes of the conditioning without
    the batch. `blocks` are the units that stages are cut from, `short` with two of each kind.
    """

    make: Callable[[Any], Any]
    latent: tuple[int, ...]
    prompt: Mapping[str, tuple[int, ...]]
    blocks: int
    short: int


def _flux(operations: Any) -> Any:
    from comfy.ldm.flux.model import Flux

    return Flux(
        in_channels=16, out_channels=16, vec_in_dim=768, context_in_dim=4096, hidden_size=3072, mlp_ratio=4.0, num_heads=24,
        depth=19, depth_single_blocks=38, axes_dim=[16, 56, 56], theta=10000, patch_size=2, qkv_bias=True,
        guidance_embed=True, txt_ids_dims=[], operations=operations, **SETTINGS,
    )  # fmt: skip


def _flux2(operations: Any) -> Any:
    from comfy.ldm.flux.model import Flux

    return Flux(
        in_channels=128, out_channels=128, vec_in_dim=None, context_in_dim=15360, hidden_size=6144, mlp_ratio=3.0,
        num_heads=48, depth=8, depth_single_blocks=48, axes_dim=[32, 32, 32, 32], theta=2000, patch_size=1, qkv_bias=False,
        guidance_embed=True, txt_ids_dims=[3], global_modulation=True, mlp_silu_act=True, ops_bias=False,
        operations=operations, **SETTINGS,
    )  # fmt: skip


def _wan(operations: Any) -> Any:
    from comfy.ldm.wan.model import WanModel

    return WanModel(
        model_type="t2v", in_dim=16, dim=5120, ffn_dim=13824, text_dim=4096, num_heads=40, num_layers=40,
        operations=operations, **SETTINGS,
    )  # fmt: skip


def _qwen(operations: Any) -> Any:
    from comfy.ldm.qwen_image.model import QwenImageTransformer2DModel

    return QwenImageTransformer2DModel(num_layers=60, operations=operations, **SETTINGS)


JOBS: Mapping[str, Job] = {
    "FLUX.1-dev": Job(_flux, (16, 128, 128), {"context": (512, 4096), "y": (768,), "guidance": ()}, 57, 4),
    "FLUX.2-dev": Job(_flux2, (128, 64, 64), {"context": (512, 15360), "guidance": ()}, 56, 4),
    "Wan 2.2 14B": Job(_wan, (16, 21, 90, 160), {"context": (512, 4096)}, 40, 2),
    "Qwen-Image": Job(_qwen, (16, 1, 128, 128), {"context": (256, 3584)}, 60, 2),
}
"""Pictures of 1024 x 1024 pixels, and a video of 81 frames of 1280 x 720: 75,600 tokens."""


def write_header(folder: Path, name: str) -> Path:
    """A safetensors file of the model's full size without data: a hole in the disk."""
    import comfy.ops

    header: dict[str, Any] = {}
    end = 0
    for key, tensor in JOBS[name].make(comfy.ops.disable_weight_init).state_dict().items():
        header[key] = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": [end, end + 2 * tensor.numel()]}
        end += 2 * tensor.numel()
    text = json.dumps(header).encode()
    path = folder / f"{name}.safetensors"
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)
    return path
