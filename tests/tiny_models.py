"""Random models of diffusers' classes, small enough for two CPU cores, and their files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor


def randomise(module: Any, seed: int) -> Any:
    """A torch module, all its parameters filled so that activations stay near 1 and every part matters.

    Of any type, because diffusers' annotations hide that its models are modules.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            drawn = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim <= 1:
                is_scale = "norm" in name and name.endswith("weight")
                parameter.copy_(1 + 0.2 * drawn if is_scale else 0.1 * drawn)
            else:
                gain = 0.5 if "norm" in name or "adaln" in name else 1.0
                parameter.copy_(gain * drawn / parameter[0].numel() ** 0.5)
    return module.eval().requires_grad_(False)


def save_model(path: Path, tensors: dict[str, Tensor], rename: Callable[[str], str]) -> Path:
    """Write tensors under other names."""
    save_file({rename(name): tensor.contiguous() for name, tensor in tensors.items()}, path)
    return path


def draw(*shape: int, seed: int) -> Tensor:
    """Standard normal numbers."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
