"""How ComfyUI puts adapters into a weight: the type in which it adds, and how it rounds the sum."""

from __future__ import annotations

import torch
from torch import Tensor

from ..importing import import_comfyui

PREFIX = "diffusion_model."
"""Before the names of weights where ComfyUI draws random numbers for rounding."""


def merging_dtype(dynamic: bool, device: torch.device) -> torch.dtype:
    """Return the dtype in which ComfyUI adds adapters to a weight on a device.

    Args:
        dynamic: True if ComfyUI loads the model dynamically. It then adds in the dtype in which the model computes. This function
            returns fp32, so that only the sum is rounded.
        device: the device of the weight.
    """
    if dynamic:
        return torch.float32
    import_comfyui()
    import comfy.model_management

    dtype: torch.dtype = comfy.model_management.lora_compute_dtype(device)
    return dtype


def rounded(values: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    """A whole weight's values in an fp8 type, each rounded up or down at random, drawn on its device by the weight's name."""
    import_comfyui()
    import comfy.float

    out: Tensor = comfy.float.stochastic_rounding(values, dtype, seed=seed_of(name))
    return out


def seed_of(name: str) -> int:
    """What a weight's rounding is drawn by."""
    import comfy.utils

    seed: int = comfy.utils.string_to_seed(f"{PREFIX}{name}")
    return seed
