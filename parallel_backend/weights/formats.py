"""Storage types of tensors in files, and the GGUF blocks that workers expand."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from torch import Tensor

EXPAND_VALUES = 1 << 24
"""Number of values of a block type that are expanded at a time, which bounds the memory for intermediate results."""

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)


@dataclass(frozen=True)
class Storage:
    """A type of stored values.

    Attributes:
        dtype: dtype of plain values; None for blocks and for types that are not `readable`.
        values: number of values of a row in one block.
        nbytes: number of bytes of one block.
        unpack: turns blocks `[n, nbytes]` (uint8) into values `[n, values]` (fp32). The second argument is the blocks as fp16
            numbers.
    """

    name: str
    dtype: torch.dtype | None
    values: int
    nbytes: int
    unpack: Callable[[Tensor, Tensor], Tensor] | None = None

    @property
    def readable(self) -> bool:
        """Return True if this pack can read tensors of this type."""
        return self.dtype is not None or self.unpack is not None

    @property
    def quantised(self) -> bool:
        """Return True for values that layers expand when they compute: blocks of GGUF, and fp8."""
        return self.dtype is None or self.dtype in FLOAT8

    def row_bytes(self, width: int) -> int:
        """Return the number of bytes of a row of `width` values, which must be whole blocks."""
        assert width % self.values == 0
        return width // self.values * self.nbytes

    def expand(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """Return stored rows `[rows, bytes]` (uint8) as values `[rows, width]` of a float dtype."""
        if self.unpack is None:
            assert self.dtype is not None
            return rows.view(self.dtype).to(dtype)
        blocks = rows.view(-1, self.nbytes)
        values = torch.empty(blocks.shape[0], self.values, dtype=dtype, device=rows.device)
        for some, into in zip(*(each.split(EXPAND_VALUES // self.values) for each in (blocks, values)), strict=True):
            into.copy_(self.unpack(some, some.view(torch.float16)))
        return values.view(rows.shape[0], -1)


def plain(name: str, dtype: torch.dtype) -> Storage:
    """Return the storage of single values of a torch dtype."""
    return Storage(name, dtype, 1, dtype.itemsize)


def unreadable(name: str, values: int, nbytes: int) -> Storage:
    """Return the storage of a tensor of a type that this pack does not know: one block of `values` values in `nbytes` bytes."""
    return Storage(name, None, max(values, 1), nbytes)


PLAIN: Mapping[torch.dtype, Storage] = {
    dtype: plain(name, dtype)
    for name, dtype in {
        "F64": torch.float64,
        "F32": torch.float32,
        "F16": torch.float16,
        "BF16": torch.bfloat16,
        "F8_E4M3": torch.float8_e4m3fn,
        "F8_E5M2": torch.float8_e5m2,
        "F8_E8M0": torch.float8_e8m0fnu,
        "I64": torch.int64,
        "I32": torch.int32,
        "I16": torch.int16,
        "I8": torch.int8,
        "U8": torch.uint8,
        "BOOL": torch.bool,
    }.items()
}
"""Plain storage types, under the names that safetensors gives them."""


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
    """Return the fp16 number at byte `start` of each block, `[n, 1]` in fp32."""
    return halves[:, start // 2, None].float()


def _shifted(data: Tensor, run: int, bits: int) -> Tensor:
    """Return each run of bytes several times, shifted right by 0, `bits`, twice `bits` and so on: `[n, bytes * 8 / bits]`.

    The device counts the shifts: a tensor made from a list would make the host wait.
    """
    by = torch.arange(0, 8, bits, dtype=torch.uint8, device=data.device)
    return (data.unflatten(1, (-1, 1, run)) >> by[:, None]).flatten(1)


def _nibbles(data: Tensor, run: int) -> Tensor:
    return _shifted(data, run, 4) & 15


def _five_bits(high: Tensor, low: Tensor) -> Tensor:
    by = torch.arange(8, dtype=torch.uint8, device=high.device)
    return _nibbles(low, 16) | (high[:, :, None] >> by & 1).flatten(1) << 4


def _six_bit_scales(blocks: Tensor, halves: Tensor) -> tuple[Tensor, Tensor]:
    """Return scale and least value of the eight parts of a block, which are packed to six bits each: `[n, 8]`.

    The first four parts have theirs in the low bits of a byte each. The high bits of the other four are above these.
    """
    low = blocks[:, 4:12].unflatten(1, (2, 1, 4))
    high = _nibbles(blocks[:, 12:16], 4).unflatten(1, (2, 1, 4)) | low >> 2 & 48
    first = torch.arange(2, device=blocks.device)[:, None] == 0
    packed = torch.where(first, low & 63, high).flatten(2)
    scale, least = (halves[:, :2, None].float() * packed.float()).unbind(1)
    return scale, least


def _scaled(scale: Tensor, values: Tensor, run: int, least: Tensor | None = None) -> Tensor:
    """Multiply each run of values by its scale and subtract its least value."""
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
"""The supported block types."""
