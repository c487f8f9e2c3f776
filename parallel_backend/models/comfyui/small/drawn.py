"""Random numbers and weights in which every part matters."""

from __future__ import annotations

from typing import Any

import torch
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


def draw(*shape: int, seed: int) -> Tensor:
    """Standard normal numbers."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
