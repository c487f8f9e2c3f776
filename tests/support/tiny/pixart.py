"""Tiny PixArt-alpha: diffusers' own class with random weights, and the original tensor names by ComfyUI's key map."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from diffusers import PixArtAlphaPipeline, PixArtTransformer2DModel
from safetensors.torch import save_file
from torch import Tensor

from tests.support.comfy_oracle import comfy_on_path
from tests.support.tiny.models import randomise

TEXT_WIDTH = 32
HEADS, HEAD_DIM, LAYERS = 16, 12, 3


def pixart(*, micro_conditions: bool = True) -> Any:
    """Return the PixArtTransformer2DModel, with the same weights at every call.

    With micro-conditions the model is of the 1024 type, without of the 512 type.
    """
    model = PixArtTransformer2DModel(
        num_attention_heads=HEADS,
        attention_head_dim=HEAD_DIM,
        num_layers=LAYERS,
        cross_attention_dim=HEADS * HEAD_DIM,
        caption_channels=TEXT_WIDTH,
        sample_size=128 if micro_conditions else 64,
    )
    return randomise(model, seed=8)


def save_pixart(path: Path, *, micro_conditions: bool = True, prefix: str = "") -> Path:
    """Write the checkpoint of a `pixart` model."""
    comfy_on_path()
    import comfy.utils

    targets = comfy.utils.pixart_to_diffusers({"depth": LAYERS, "hidden_size": HEADS * HEAD_DIM})
    parts: dict[str, list[tuple[int, Tensor]]] = {}
    for name, tensor in pixart(micro_conditions=micro_conditions).state_dict().items():
        target = targets[name]
        key, offset = (target, 0) if isinstance(target, str) else (target[0], target[1][1])
        parts.setdefault(key, []).append((offset, tensor))
    tensors = {
        prefix + key: torch.cat([tensor for _, tensor in sorted(rows, key=lambda row: row[0])]).contiguous()
        for key, rows in parts.items()
    }
    save_file(tensors, path)
    return path


def denoised_by_diffusers(
    transformer: Any, scheduler: Any, noise: Tensor, prompts: Sequence[tuple[Tensor, Tensor]], steps: int, cfg: float
) -> Tensor:
    """Return the latent of diffusers' own pipeline, of the noise's shape `[batch, 4, height, width]`.

    Args:
        prompts: the text and the mask of the positive and of the negative prompt, of one length.
    """
    pipeline: Any = PixArtAlphaPipeline(None, None, None, transformer, scheduler)
    pipeline.set_progress_bar_config(disable=True)
    (text, mask), (negative, negative_mask) = prompts
    latent: Tensor = pipeline(
        negative_prompt=None,
        prompt_embeds=text,
        prompt_attention_mask=mask,
        negative_prompt_embeds=negative,
        negative_prompt_attention_mask=negative_mask,
        height=8 * noise.shape[2],
        width=8 * noise.shape[3],
        num_inference_steps=steps,
        guidance_scale=cfg,
        latents=noise,
        output_type="latent",
        use_resolution_binning=False,
    ).images
    return latent
