"""Random models of diffusers' classes, small enough for two CPU cores, and their files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from parallel_backend.models.comfyui.reduced import draw, randomise

__all__ = ["draw", "randomise", "save_model"]


def save_model(path: Path, tensors: dict[str, Tensor], rename: Callable[[str], str]) -> Path:
    """Write tensors under new names."""
    save_file({rename(name): tensor.contiguous() for name, tensor in tensors.items()}, path)
    return path
