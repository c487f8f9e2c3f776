"""The dtype in which ComfyUI adds adapters to a weight, and its rounding of the sum."""

from __future__ import annotations

import torch
from torch import Tensor

from ..importing import import_comfyui

PREFIX = "diffusion_model."
"""The prefix of a weight's name in the seed of ComfyUI's random rounding."""


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
    """Round the values of a whole weight to an fp8 dtype, up or down at random.

    The random numbers are drawn on the weight's device, and the weight's name is the seed.
    """
    import_comfyui()
    import comfy.float

    out: Tensor = comfy.float.stochastic_rounding(values, dtype, seed=seed_of(name))
    return out


def seed_of(name: str) -> int:
    """Return the seed of a weight's random rounding."""
    import comfy.utils

    seed: int = comfy.utils.string_to_seed(f"{PREFIX}{name}")
    return seed
