"""What is known of a checkpoint from its headers: its tensors, where their bytes lie and what they are."""

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
    """One tensor: its bytes begin at `offset` of `file`.

    `shape` is that of its values. `scale`, if there is one, is the tensor that they are multiplied by: of one value, or
    of one for each row. With `parts` it is no tensor of a file but these runs of rows of such, joined along dim 0.
    Where it is `as_stored`, its values are part of a quantised weight and stay in its type.
    """

    storage: Storage
    shape: tuple[int, ...]
    offset: int
    file: Path
    scale: TensorEntry | None = None
    parts: tuple[Run, ...] = ()
    as_stored: bool = False

    def runs(self, start: int, stop: int) -> Iterator[Run]:
        """Its rows `start` to `stop` as rows of tensors of the file."""
        offset = 0
        for entry, first, last in self.parts or ((self, 0, self.rows),):
            begin, end = max(start, offset), min(stop, offset + last - first)
            if begin < end:
                yield entry, first + begin - offset, first + end - offset
            offset += last - first

    @property
    def rows(self) -> int:
        """Its size along the first dimension; a single value is one row."""
        return self.shape[0] if self.shape else 1

    @property
    def dtype(self) -> torch.dtype | None:
        """The type of plain values; None for blocks of quantised ones."""
        return self.storage.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of data in the file."""
        return math.prod(self.shape) // self.storage.values * self.storage.nbytes

    @property
    def row_bytes(self) -> int:
        """Bytes of one row (dim 0)."""
        return self.nbytes // self.rows if self.nbytes else 0


Run = tuple[TensorEntry, int, int]
"""Rows of a tensor of a file: from the first to before the second number."""


def join(runs: tuple[Run, ...]) -> TensorEntry:
    """Runs of rows as one tensor. Raises ValueError where their other sizes differ."""
    first = runs[0][0]
    for entry, _, stop in runs:
        if entry.shape[1:] != first.shape[1:] or entry.shape[:1] < (stop,):
            raise ValueError(f"rows of {list(entry.shape)} and {list(first.shape)} do not make one tensor")
    rows = sum(stop - start for _, start, stop in runs)
    return replace(first, shape=(rows, *first.shape[1:]), parts=runs)


@dataclass(frozen=True)
class Checkpoint:
    """The headers of a checkpoint: its tensors by name. No tensor data is held.

    `path` is what the user chose, `files` what it consists of, `metadata` what the header says beside the tensors. Where it
    `drops_ones`, its format may have lost sizes of 1 at the front of shapes.
    """

    path: Path
    entries: Mapping[str, TensorEntry]
    files: tuple[Path, ...]
    metadata: Mapping[str, str] = field(default_factory=dict)
    drops_ones: bool = False

    def select(self, prefix: str, rename: Callable[[str], str]) -> Checkpoint:
        """Only the tensors whose names begin with `prefix`, without it and renamed."""
        entries = {
            rename(name.removeprefix(prefix)): entry for name, entry in self.entries.items() if name.startswith(prefix)
        }
        return replace(self, entries=entries)

    def meta_tensors(self) -> dict[str, Tensor]:
        """The tensors on the meta device: shapes and dtypes without data.

        Quantised blocks count as fp16, and what is of a type that this pack does not know as bytes.
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
        """When it was last modified (ns) and how many bytes it has: what tells a replaced checkpoint."""
        states = [file.stat() for file in self.files]
        return max(state.st_mtime_ns for state in states), sum(state.st_size for state in states)


def check_overlap(entries: Mapping[str, TensorEntry]) -> None:
    """Raises ValueError where two tensors of one file share bytes."""
    spans = sorted((e.offset, e.offset + e.nbytes, name) for name, e in entries.items() if e.nbytes)
    for (_, stop, name), (start, _, next_name) in pairwise(spans):
        if start < stop:
            raise ValueError(f"tensors {name} and {next_name} overlap")
