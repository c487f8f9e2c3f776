"""The content of a checkpoint by its headers: its tensors, the position of their bytes, and their types."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from ..formats import Storage


@dataclass(frozen=True)
class TensorEntry:
    """One tensor, whose bytes begin at `offset` of `file`.

    Attributes:
        storage: type of the stored values.
        shape: shape of the values.
        scale: the tensor that multiplies the values, with one value, or one for each row; None if there is none.
        parts: runs of rows of the file's tensors that make this tensor, joined along dim 0. A tensor of the file has no parts.
        as_stored: True if the values are part of a quantised weight and keep their type.
    """

    storage: Storage
    shape: tuple[int, ...]
    offset: int
    file: Path
    scale: TensorEntry | None = None
    parts: tuple[Run, ...] = ()
    as_stored: bool = False

    def runs(self, start: int, stop: int) -> Iterator[Run]:
        """Yield the rows `start` to `stop` as rows of tensors of the file."""
        offset = 0
        for entry, first, last in self.parts or ((self, 0, self.rows),):
            begin, end = max(start, offset), min(stop, offset + last - first)
            if begin < end:
                yield entry, first + begin - offset, first + end - offset
            offset += last - first

    @property
    def rows(self) -> int:
        """Return the size along the first dimension. A single value is one row."""
        return self.shape[0] if self.shape else 1

    @property
    def dtype(self) -> torch.dtype | None:
        """Return the dtype of plain values, or None for quantised blocks."""
        return self.storage.dtype

    @property
    def nbytes(self) -> int:
        """Return the number of data bytes in the file."""
        return math.prod(self.shape) // self.storage.values * self.storage.nbytes

    @property
    def row_bytes(self) -> int:
        """Return the number of bytes of one row (dim 0)."""
        return self.nbytes // self.rows if self.nbytes else 0


Run = tuple[TensorEntry, int, int]
"""Rows of a tensor of a file: the tensor, the first row, and the row after the last."""


def join(runs: tuple[Run, ...]) -> TensorEntry:
    """Join runs of rows into one tensor.

    Raises:
        ValueError: the other sizes of the rows differ, or a tensor has too few rows.
    """
    first = runs[0][0]
    for entry, _, stop in runs:
        if entry.shape[1:] != first.shape[1:] or entry.shape[:1] < (stop,):
            raise ValueError(f"rows of {list(entry.shape)} and {list(first.shape)} do not make one tensor")
    rows = sum(stop - start for _, start, stop in runs)
    return replace(first, shape=(rows, *first.shape[1:]), parts=runs)


@dataclass(frozen=True)
class Checkpoint:
    """The headers of a checkpoint: its tensors by name, without their data.

    Attributes:
        path: the file or folder that the user chose.
        files: the files that the checkpoint consists of.
        metadata: the header's entries besides the tensors.
        drops_ones: True if the format may have lost sizes of 1 at the front of shapes.
    """

    path: Path
    entries: Mapping[str, TensorEntry]
    files: tuple[Path, ...]
    metadata: Mapping[str, str] = field(default_factory=dict)
    drops_ones: bool = False

    def select(self, prefix: str, rename: Callable[[str], str]) -> Checkpoint:
        """Return only the tensors whose names begin with `prefix`, without the prefix and renamed."""
        entries = {
            rename(name.removeprefix(prefix)): entry for name, entry in self.entries.items() if name.startswith(prefix)
        }
        return replace(self, entries=entries)

    def meta_tensors(self) -> dict[str, Tensor]:
        """Return the tensors on the meta device: shapes and dtypes without data.

        Quantised blocks count as fp16. Tensors of a type that this pack does not know count as bytes.
        """
        return {
            name: torch.empty(
                entry.shape,
                dtype=entry.dtype or (torch.float16 if entry.storage.readable else torch.uint8),
                device="meta",
            )
            for name, entry in self.entries.items()
        }

    def fingerprint(self) -> tuple[int, int]:
        """Return the time of the last change (ns) and the number of bytes. A replaced checkpoint has other numbers."""
        states = [file.stat() for file in self.files]
        return max(state.st_mtime_ns for state in states), sum(state.st_size for state in states)


def check_overlap(entries: Mapping[str, TensorEntry]) -> None:
    """Raise ValueError if two tensors of one file share bytes."""
    spans = sorted((e.offset, e.offset + e.nbytes, name) for name, e in entries.items() if e.nbytes)
    for (_, stop, name), (start, _, next_name) in pairwise(spans):
        if start < stop:
            raise ValueError(f"tensors {name} and {next_name} overlap")
