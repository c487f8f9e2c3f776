"""Tiny CogVideoX models of each type: diffusers' own class with random weights, written with ComfyUI's tensor names."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from diffusers import (
    CogVideoXDDIMScheduler,
    CogVideoXDPMScheduler,
    CogVideoXImageToVideoPipeline,
    CogVideoXPipeline,
    CogVideoXTransformer3DModel,
)
from torch import Tensor

from parallel_backend.models.diffusers.cogvideox_keys import comfy_name
from tests.support.tiny.models import randomise, save_model

TEXT_WIDTH = 32

_COMMON = {"attention_head_dim": 16, "text_embed_dim": TEXT_WIDTH, "time_embed_dim": 64, "num_layers": 3}
_ROTARY = {"use_rotary_positional_embeddings": True}

TYPES = MappingProxyType(
    {
        "2b": _COMMON | {"num_attention_heads": 30, "attention_head_dim": 8},
        "2b-odd": _COMMON | {"num_attention_heads": 5},
        "5b": _COMMON | _ROTARY | {"num_attention_heads": 48},
        "1.5": _COMMON | _ROTARY | {"num_attention_heads": 3, "attention_head_dim": 64, "patch_size_t": 2},
        "1.5-i2v": _COMMON
        | _ROTARY
        | {"num_attention_heads": 5, "patch_size_t": 2, "in_channels": 32, "ofs_embed_dim": 64},
        "5b-i2v": _COMMON | _ROTARY | {"num_attention_heads": 48, "in_channels": 32},
    }
)
"""Arguments of CogVideoXTransformer3DModel."""


def cogvideox(kind: str, **changes: Any) -> Any:
    """Return a CogVideoXTransformer3DModel of a type, with the same weights at every call."""
    return randomise(CogVideoXTransformer3DModel(**(TYPES[kind] | changes)), seed=len(kind))


def save_cogvideox(path: Path, kind: str, *, prefix: str = "", **changes: Any) -> Path:
    """Write the checkpoint of a `cogvideox` model."""
    return save_model(path, cogvideox(kind, **changes).state_dict(), lambda name: prefix + comfy_name(name))


def schedulers(kind: str) -> dict[str, Any]:
    """Return CogVideoX's own schedulers by our samplers' names, with the settings of the models' scheduler_config.json."""
    settings = {
        "beta_schedule": "scaled_linear",
        "clip_sample": False,
        "prediction_type": "v_prediction",
        "rescale_betas_zero_snr": True,
        "snr_shift_scale": 3.0 if kind.startswith("2b") else 1.0,
        "timestep_spacing": "trailing",
    }
    return {
        "cogvideox_ddim": CogVideoXDDIMScheduler(**settings),
        "cogvideox_dpm": CogVideoXDPMScheduler(**settings),
    }


def denoised_by_diffusers(
    transformer: Any,
    scheduler: Any,
    noise: Tensor,
    prompts: Sequence[Tensor],
    steps: int,
    cfg: float,
    vae: Any = None,
    image: Any = None,
) -> Tensor:
    """Return the latent `[batch, 16, frames, height, width]` of diffusers' own pipeline.

    Args:
        noise: of the latent's shape.
        prompts: the positive and the negative text `[1, tokens, width]`.
        vae: encodes the image.
        image: the picture that the video begins with, for models that take one.
    """
    make = CogVideoXPipeline if image is None else CogVideoXImageToVideoPipeline
    pipeline: Any = make(None, None, vae, transformer, scheduler)
    pipeline.set_progress_bar_config(disable=True)
    batch, _, frames, height, width = noise.shape
    latent: Tensor = pipeline(
        **({} if image is None else {"image": image, "generator": torch.Generator().manual_seed(0)}),
        prompt_embeds=prompts[0].repeat(batch, 1, 1),
        negative_prompt_embeds=prompts[1].repeat(batch, 1, 1),
        height=8 * height,
        width=8 * width,
        num_frames=4 * frames - 3,
        num_inference_steps=steps,
        guidance_scale=cfg,
        latents=noise.transpose(1, 2),
        output_type="latent",
    ).frames
    return latent.transpose(1, 2)
