"""GGUF's block types, expanded with torch on the device; the arithmetic is that of the gguf package, bit for bit.

Layouts: ggml-common.h of https://github.com/ggml-org/llama.cpp. `unpack` functions take blocks `[n, bytes]` (uint8), and the
same as fp16 numbers `[n, bytes / 2]`, and return values `[n, values]` (fp32).

A compiler may make one operation of a product and a sum, which rounds once. That changes no bit here: each product is of an
fp16 number (11 bits), a scale (at most 8) and a value (at most 5), and so fp32 has it exactly.
"""

from __future__ import annotations

import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from torch import Tensor

from .storage import Storage


def _q4_0(blocks: Tensor, halves: Tensor) -> Tensor:
    return _half(halves, 0) * (_nibbles(blocks[:, 2:], 16).float() - 8)


def _q4_1(blocks: Tensor, halves: Tensor) -> Tensor:
    return _half(halves, 0) * _nibbles(blocks[:, 4:], 16).float() + _half(halves, 2)


def _q5_0(blocks: Tensor, halves: Tensor) -> Tensor:
    return _half(halves, 0) * (_five_bits(blocks[:, 2:6], blocks[:, 6:]).float() - 16)


def _q5_1(blocks: Tensor, halves: Tensor) -> Tensor:
    return _half(halves, 0) * _five_bits(blocks[:, 4:8], blocks[:, 8:]).float() + _half(halves, 2)


def _q8_0(blocks: Tensor, halves: Tensor) -> Tensor:
    return blocks[:, 2:].view(torch.int8).float() * _half(halves, 0)


def _q2_k(blocks: Tensor, halves: Tensor) -> Tensor:
    scales, values = blocks[:, :16], _shifted(blocks[:, 16:80], 32, 2) & 3
    scale = _half(halves, 80) * (scales & 15).float()
    least = _half(halves, 82) * (scales >> 4).float()
    return _scaled(scale, values.float(), 16, least)


def _q3_k(blocks: Tensor, halves: Tensor) -> Tensor:
    packed = blocks[:, 96:108]
    low = _shifted(packed[:, :8], 8, 4) & 15
    high = _shifted(packed[:, 8:], 4, 2) & 3
    scales = (low | high << 4).float() - 32
    values = (_shifted(blocks[:, 32:96], 32, 2) & 3).float()
    absent = (_shifted(blocks[:, :32], 32, 1) & 1) ^ 1
    return _scaled(_half(halves, 108) * scales, values - 4 * absent.float(), 16)


def _q4_k(blocks: Tensor, halves: Tensor) -> Tensor:
    scale, least = _six_bit_scales(blocks, halves)
    return _scaled(scale, _nibbles(blocks[:, 16:], 32).float(), 32, least)


def _q5_k(blocks: Tensor, halves: Tensor) -> Tensor:
    scale, least = _six_bit_scales(blocks, halves)
    high = _shifted(blocks[:, 16:48], 32, 1) & 1
    return _scaled(scale, (_nibbles(blocks[:, 48:], 32) | high << 4).float(), 32, least)


def _q6_k(blocks: Tensor, halves: Tensor) -> Tensor:
    low = _nibbles(blocks[:, :128], 64)
    high = _shifted(blocks[:, 128:192], 32, 2) & 3
    scale = _half(halves, 208) * blocks[:, 192:208].view(torch.int8).float()
    return _scaled(scale, (low | high << 4).float() - 32, 16)


def _half(halves: Tensor, start: int) -> Tensor:
    """The fp16 number that each block has from its byte `start` on, `[n, 1]` in fp32."""
    return halves[:, start // 2, None].float()


def _shifted(data: Tensor, run: int, bits: int) -> Tensor:
    """Each run of bytes once for each number of bits that a byte has, shifted right to it: `[n, bytes * 8 / bits]`.

    How far is counted on the device: a tensor made of a list would have the host wait for it.
    """
    by = torch.arange(0, 8, bits, dtype=torch.uint8, device=data.device)
    return (data.unflatten(1, (-1, 1, run)) >> by[:, None]).flatten(1)


def _nibbles(data: Tensor, run: int) -> Tensor:
    return _shifted(data, run, 4) & 15


def _five_bits(high: Tensor, low: Tensor) -> Tensor:
    by = torch.arange(8, dtype=torch.uint8, device=high.device)
    return _nibbles(low, 16) | (high[:, :, None] >> by & 1).flatten(1) << 4


def _six_bit_scales(blocks: Tensor, halves: Tensor) -> tuple[Tensor, Tensor]:
    """Scale and least value of the eight parts of a block, packed to six bits each: `[n, 8]`.

    Those of the first four parts are in the low bits of a byte each; the others' high bits are above them.
    """
    low = blocks[:, 4:12].unflatten(1, (2, 1, 4))
    high = _nibbles(blocks[:, 12:16], 4).unflatten(1, (2, 1, 4)) | low >> 2 & 48
    first = torch.arange(2, device=blocks.device)[:, None] == 0
    packed = torch.where(first, low & 63, high).flatten(2)
    scale, least = (halves[:, :2, None].float() * packed.float()).unbind(1)
    return scale, least


def _scaled(scale: Tensor, values: Tensor, run: int, least: Tensor | None = None) -> Tensor:
    """Each run of values times its scale, less its least value."""
    product = scale[:, :, None] * values.unflatten(1, (-1, run))
    return (product if least is None else product - least[:, :, None]).flatten(1)


BLOCK_TYPES = {
    kind: Storage(kind.name, None, *GGML_QUANT_SIZES[kind], unpack)
    for kind, unpack in {
        GGMLQuantizationType.Q8_0: _q8_0,
        GGMLQuantizationType.Q6_K: _q6_k,
        GGMLQuantizationType.Q5_K: _q5_k,
        GGMLQuantizationType.Q5_1: _q5_1,
        GGMLQuantizationType.Q5_0: _q5_0,
        GGMLQuantizationType.Q4_K: _q4_k,
        GGMLQuantizationType.Q4_1: _q4_1,
        GGMLQuantizationType.Q4_0: _q4_0,
        GGMLQuantizationType.Q3_K: _q3_k,
        GGMLQuantizationType.Q2_K: _q2_k,
    }.items()
}
"""The block types that are supported."""
