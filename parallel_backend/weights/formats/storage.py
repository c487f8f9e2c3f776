"""How the values of a tensor lie in bytes: plain types, and blocks of quantised values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

EXPAND_VALUES = 1 << 24
"""Values of a block type that are expanded at a time, which bounds the memory for what lies in between."""

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)


@dataclass(frozen=True)
class Storage:
    """A type of stored values.

    `dtype` is that of plain values, None for blocks and for what is not `readable`. A block holds `values` values of a row in
    `nbytes` bytes, and `unpack` turns blocks `[n, nbytes]` (uint8), which it is also given as fp16 numbers, into values
    `[n, values]` (fp32).
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
        """Whether values are expanded where they are used: blocks, and fp8."""
        return self.dtype is None or self.dtype in FLOAT8

    def row_bytes(self, width: int) -> int:
        """Bytes of a row of `width` values, which must be whole blocks."""
        assert width % self.values == 0
        return width // self.values * self.nbytes

    def expand(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """Stored rows `[rows, bytes]` (uint8) as values `[rows, width]` of a float type."""
        if self.unpack is None:
            assert self.dtype is not None
            return rows.view(self.dtype).to(dtype)
        blocks = rows.view(-1, self.nbytes)
        values = torch.empty(blocks.shape[0], self.values, dtype=dtype, device=rows.device)
        for some, into in zip(*(each.split(EXPAND_VALUES // self.values) for each in (blocks, values)), strict=True):
            into.copy_(self.unpack(some, some.view(torch.float16)))
        return values.view(rows.shape[0], -1)


def plain(name: str, dtype: torch.dtype) -> Storage:
    """Values one by one in a torch type."""
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
"""Plain types, under the names that safetensors gives them."""
