"""Conversion of files with diffusers' tensor names to ComfyUI's names.

ComfyUI's own conversion runs on numbers of rows in place of the rows.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ...errors import Refused
from ...weights.files.entry import Checkpoint, Run, join

COMPANIONS = ("comfy_quant", "weight_scale", "weight_scale_2", "scale_weight")
"""The last parts of the names of tensors that belong to a quantised weight."""

MISSING = -1
"""The number of a row that no tensor of the file provides."""


def converted(part: Checkpoint) -> Checkpoint | None:
    """Return a file's tensors, joined and cut by rows, as ComfyUI's model has them; None if ComfyUI knows none of them.

    Raises:
        Refused: tensors are missing, or do not fit the tensors that they are joined with.
    """
    import comfy.model_detection

    names = [name for name, entry in part.entries.items() if entry.nbytes and entry.shape]
    ends = list(accumulate((part.entries[name].shape[0] for name in names), initial=0))
    rows = [torch.arange(start, stop) for start, stop in pairwise(ends)]
    state_dict = _LastRequested(zip(names, rows, strict=True))
    try:
        with _Marked():
            rows_by_name: Mapping[str, Tensor] | None = comfy.model_detection.convert_diffusers_mmdit(state_dict, "")
    except KeyError as error:
        raise _incomplete(part, error.args[0]) from None
    except RuntimeError:
        raise _incomplete(part, state_dict.requested) from None
    if not rows_by_name:
        return None
    if scale := next((name for name in part.entries if name.rpartition(".")[2] in COMPANIONS), None):
        raise Refused(
            f"{part.path.name} holds {scale} under diffusers' names, where quantised weights are not supported: choose a file "
            "in ComfyUI's own layout."
        )
    entries = {}
    for name, numbers in rows_by_name.items():
        if not numbers.numel() or int(numbers.min()) == MISSING:
            raise _incomplete(part, name)
        runs = tuple(_runs([part.entries[each] for each in names], ends, numbers))
        try:
            entries[name] = join(runs) if len(runs) > 1 else runs[0][0]
        except ValueError:
            raise _incomplete(part, name) from None
    return replace(part, entries=entries)


class _LastRequested(dict[str, Tensor]):
    """A dict of tensors that records the name that was requested last."""

    requested = ""

    def get(self, name: str, default: Any = None) -> Any:
        """Return the tensor or the default, and record the name."""
        self.requested = name
        return super().get(name, default)


class _Marked(TorchFunctionMode):
    """A function mode that fills new uninitialised tensors with MISSING."""

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Return the function's result, filled if it is an uninitialised tensor."""
        result = func(*args, **(kwargs or {}))
        return result.fill_(MISSING) if func in (torch.empty, torch.empty_like) else result


def _runs(entries: Sequence[Any], ends: Sequence[int], numbers: Tensor) -> Iterator[Run]:
    """Yield the rows of the file's tensors that these numbers identify, as runs of consecutive rows."""
    breaks = [0, *((numbers.diff() != 1).nonzero()[:, 0] + 1).tolist(), numbers.numel()]
    for start, stop in pairwise(breaks):
        first, last = int(numbers[start]), int(numbers[stop - 1])
        while first <= last:  # numbers of consecutive tensors are consecutive
            index = bisect_right(ends, first) - 1
            end = min(last + 1, ends[index + 1])
            yield entries[index], first - ends[index], end - ends[index]
            first = end


def _incomplete(part: Checkpoint, name: str) -> Refused:
    return Refused(f"{part.path.name} lacks rows of the tensor {name}: choose a complete file.")
