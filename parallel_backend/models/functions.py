"""What several families compute in the same way."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def layer_norm(norm: nn.LayerNorm, x: Tensor) -> Tensor:
    """A LayerNorm module applied with its weights cast to the input's dtype."""
    weight, bias = (None if part is None else part.to(x.dtype) for part in (norm.weight, norm.bias))
    return F.layer_norm(x, norm.normalized_shape, weight, bias, norm.eps)


def conv_as_linear(conv: nn.Conv2d, patches: Tensor) -> Tensor:
    """A convolution that does not overlap, applied to patches `[..., channels * patch area]`."""
    assert conv.bias is not None
    return F.linear(patches, conv.weight.flatten(1).to(patches.dtype), conv.bias.to(patches.dtype))


def rotate(x: Tensor, rope: Tensor | None) -> Tensor:
    """Rotary positions (arXiv 2104.09864), if any, on `[batch, tokens, heads, head_dim]`, computed in fp32.

    Pairs of features are multiplied as complex numbers by `rope` `[tokens, head_dim / 2]` (complex64).
    """
    if rope is None:
        return x
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * rope[:, None]).flatten(-2).to(x.dtype)


def sinusoids(values: Tensor, width: int) -> Tensor:
    """Sinusoidal features `[..., width]` of numbers, in fp32, cosine first (DDPM, arXiv 2006.11239)."""
    half = width // 2
    frequencies = torch.exp(-math.log(10000) * torch.arange(half, dtype=torch.float32, device=values.device) / half)
    angles = values[..., None].float() * frequencies
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


def sine_positions(positions: Tensor, width: int) -> Tensor:
    """Absolute positions `[tokens]` as features `[tokens, width]` in fp64, sine first (MAE, arXiv 2111.06377)."""
    omega = 1.0 / 10000 ** (torch.arange(width // 2, dtype=torch.float64, device=positions.device) / (width / 2))
    angles = torch.outer(positions.double(), omega)
    return torch.cat([angles.sin(), angles.cos()], dim=1)


def pad_circularly(latent: Tensor, patch: int) -> Tensor:
    """A latent whose last two sizes are made multiples of `patch`, as ComfyUI pads."""
    padding = (0, -latent.shape[-1] % patch, 0, -latent.shape[-2] % patch)
    if not any(padding):
        return latent
    flat = F.pad(latent.flatten(0, -4), padding, mode="circular")
    return flat.view(*latent.shape[:-2], *flat.shape[-2:])
