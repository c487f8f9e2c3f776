"""Codecs for tensors that attention sends to other ranks: exact, or fp8 (e4m3 of OCP) with a scale per token and head."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

E4M3 = torch.float8_e4m3fn

MAX_E4M3 = 448.0
"""The largest value of e4m3."""

MIN_SCALE = 2.0**-100
"""The smallest scale, used for a row of zeros."""

SCALE_BYTES = 4

MANTISSA, EXPONENT = 0x7FFFFF, 0x7F800000
"""Bit masks of fp32's fields."""


class Codec(Protocol):
    """An encoding of the last dimension, `[…, head_dim]` to `[…, channels]`."""

    def encode(self, x: Tensor) -> Tensor:
        """Return the tensor to send, `[…, channels]`, for `[…, head_dim]`."""

    def decode(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """Return `[…, head_dim]` of this dtype for `[…, channels]`."""


class ExactCodec:
    """A codec that sends values as they are, in the dtype of the computation."""

    def encode(self, x: Tensor) -> Tensor:
        """Return the same tensor."""
        return x

    def decode(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the same tensor."""
        return rows


class Fp8Codec:
    """A codec that sends bytes: values in e4m3, followed by their fp32 scale. Some transports do not know e4m3.

    The scale is the smallest power of two that makes all values fit. So encoding a decoded tensor again changes nothing,
    in any dtype, and the relative error is the format's own, at most 2^-4.
    """

    def encode(self, x: Tensor) -> Tensor:
        """Return uint8 `[…, head_dim + 4]` for `[…, head_dim]`. The head_dim must be a multiple of 4."""
        max_abs = torch.linalg.vector_norm(x, torch.inf, dim=-1, keepdim=True, dtype=torch.float32)
        min_scale = (max_abs / MAX_E4M3).clamp(min=MIN_SCALE)
        scale = ((min_scale.view(torch.int32) + MANTISSA) & EXPONENT).view(torch.float32)
        rows = torch.empty(*x.shape[:-1], x.shape[-1] + SCALE_BYTES, dtype=torch.uint8, device=x.device)
        wide = _fp32_range(x.dtype)  # a product with a power of two is exact in this dtype
        rows[..., :-SCALE_BYTES].view(E4M3).copy_(x.to(wide) * scale.reciprocal().to(wide))
        rows[..., -SCALE_BYTES:].view(torch.float32).copy_(scale)
        return rows

    def decode(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """Return values times their scale, `[…, head_dim]`."""
        values, scale = rows[..., :-SCALE_BYTES].view(E4M3), rows[..., -SCALE_BYTES:].view(torch.float32)
        wide = _fp32_range(dtype)
        return values.to(wide).mul_(scale.to(wide)).to(dtype)


def _fp32_range(dtype: torch.dtype) -> torch.dtype:
    """Return `dtype` if it has the range of fp32, which saves memory; otherwise fp32."""
    return torch.float32 if dtype == torch.float16 else dtype


EXACT, FP8 = ExactCodec(), Fp8Codec()
