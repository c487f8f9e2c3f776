"""How what attention exchanges travels: as it is, or in fp8 (OCP's e4m3) with a scale for each token and head."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0
"""Of e4m3's values."""

SMALLEST_SCALE = 2.0**-100
"""Of a token that is all zero."""

SCALE_BYTES = 4
MANTISSA, EXPONENT = 0x7FFFFF, 0x7F800000
"""Bits of a number in fp32."""


class Payload(Protocol):
    """A form in which `[…, head_dim]` travels."""

    def packed(self, x: Tensor) -> Tensor:
        """`[…, row]`: what is sent, a row for each token and head."""

    def unpacked(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """The reverse, in the type that was packed."""


class Exact:
    """The values themselves, in the dtype that attention computes with."""

    def packed(self, x: Tensor) -> Tensor:
        """The same tensor."""
        return x

    def unpacked(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """The same tensor."""
        return rows


class Fp8:
    """Bytes: those of e4m3's values and behind them their scale in fp32, as not every transport knows the type.

    The scale is the least power of two that makes all fit. So what has been packed once is packed again without a change,
    whatever type it was unpacked to, and the values' precision is the format's own: 2^-4 at most.
    """

    def packed(self, x: Tensor) -> Tensor:
        """uint8; head_dim is a multiple of 4."""
        largest = torch.linalg.vector_norm(x, torch.inf, dim=-1, keepdim=True, dtype=torch.float32)
        least = (largest / LARGEST).clamp(min=SMALLEST_SCALE)
        scale = ((least.view(torch.int32) + MANTISSA) & EXPONENT).view(torch.float32)
        rows = torch.empty(*x.shape[:-1], x.shape[-1] + SCALE_BYTES, dtype=torch.uint8, device=x.device)
        wide = _wide(x.dtype)  # multiplying by a power of two is exact there
        rows[..., :-SCALE_BYTES].view(E4M3).copy_(x.to(wide) * scale.reciprocal().to(wide))
        rows[..., -SCALE_BYTES:].view(torch.float32).copy_(scale)
        return rows

    def unpacked(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """Values times their scale."""
        values, scale = rows[..., :-SCALE_BYTES].view(E4M3), rows[..., -SCALE_BYTES:].view(torch.float32)
        wide = _wide(dtype)
        return values.to(wide).mul_(scale.to(wide)).to(dtype)


def _wide(dtype: torch.dtype) -> torch.dtype:
    """The type itself, if it has the range of fp32, so that no more memory is taken."""
    return torch.float32 if dtype == torch.float16 else dtype


EXACT, FP8 = Exact(), Fp8()
