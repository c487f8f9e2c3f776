"""Tensors that ComfyUI makes from rows of a file's tensors, such as queries, keys and values from one tensor."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise

import torch
from torch import Tensor

from ...weights.files.entry import Run, TensorEntry, join

Process = Callable[[dict[str, Tensor]], Mapping[str, Tensor]]
"""A function of ComfyUI that changes a diffusion model's tensors before it loads them."""


def moved_rows(
    process: Process, tensors: Mapping[str, Tensor], processed: Mapping[str, Tensor], entries: Mapping[int, TensorEntry]
) -> dict[str, TensorEntry]:
    """Find the tensors that `process` makes from rows of the file's tensors.

    The function runs `process` once more with random numbers that identify the rows. A tensor that ComfyUI has changed in any
    other way has other numbers and is not found.

    Args:
        process: ComfyUI's function.
        tensors: the file's tensors by name, on the meta device unless their values were read.
        processed: the result of `process` for these tensors.
        entries: the file's entries of the tensors, by the tensors' `id`.

    Returns:
        The entries, by name, of the tensors that consist of rows alone. Other tensors are left out.
    """
    new = {name: tensor.shape for name, tensor in processed.items() if id(tensor) not in entries}
    if not new:
        return {}
    unchanged = {id(tensor) for tensor in processed.values()}
    consumed = {
        name: entries[id(tensor)]
        for name, tensor in tensors.items()
        if id(tensor) not in unchanged and id(tensor) in entries and _is_plain(entries[id(tensor)])
    }
    if not consumed:
        return {}
    numbers = {name: _draw(seed, entry.shape) for seed, (name, entry) in enumerate(consumed.items())}
    again = process({**tensors, **numbers})
    rows = _Rows(consumed, numbers)
    new_entries = {name: rows.entry(again[name], shape) for name, shape in new.items() if name in again}
    return {name: entry for name, entry in new_entries.items() if entry is not None}


class _Rows:
    """An index that finds rows of tensors by their numbers."""

    def __init__(self, entries: Mapping[str, TensorEntry], numbers: Mapping[str, Tensor]) -> None:
        self._entries = list(entries.values())
        self._numbers = list(numbers.values())
        firsts = torch.cat([each.flatten(1)[:, 0] if each.ndim > 1 else each for each in self._numbers])
        self._sorted, self._order = firsts.sort()
        self._starts = torch.tensor([0, *(len(each) for each in self._numbers)]).cumsum(0)

    def entry(self, tensor: Tensor, shape: torch.Size) -> TensorEntry | None:
        """Return the entry of a tensor that consists of rows; None if it does not. `shape` is the real tensor's shape."""
        if (
            tensor.dtype != torch.int64
            or tensor.shape[:1] != shape[:1]
            or tensor.ndim != len(shape)
            or not tensor.numel()
        ):
            return None
        firsts = tensor.flatten(1)[:, 0].contiguous() if tensor.ndim > 1 else tensor
        rank = torch.searchsorted(self._sorted, firsts).clamp(max=len(self._sorted) - 1)
        if not torch.equal(self._sorted[rank], firsts):
            return None
        row = self._order[rank]
        which = torch.searchsorted(self._starts, row, right=True) - 1
        begins = [0, *((row.diff() != 1) | (which.diff() != 0)).nonzero().flatten().add(1).tolist(), len(row)]
        runs: list[Run] = []
        for begin, end in pairwise(begins):
            number = int(which[begin])
            start = int(row[begin] - self._starts[number])
            stop = start + end - begin
            if not torch.equal(self._numbers[number][start:stop], tensor[begin:end]):
                return None
            runs.append((self._entries[number], start, stop))
        if any(entry.shape[1:] != shape[1:] for entry, _, _ in runs):
            return None
        return join(tuple(runs))


def _is_plain(entry: TensorEntry) -> bool:
    """Return True if the rows of an entry can be separated."""
    return entry.dtype is not None and entry.scale is None and not entry.parts and bool(entry.shape)


def _draw(seed: int, shape: tuple[int, ...]) -> Tensor:
    """Draw random numbers for the rows of a tensor, at most two along each other dimension."""
    size = (shape[0], *(min(2, each) for each in shape[1:]))
    return torch.randint(1 << 62, size, generator=torch.Generator().manual_seed(seed))
