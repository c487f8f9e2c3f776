"""Measures the peak bytes of the tensors that a piece of work allocates."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Allocations(TorchDispatchMode):
    """A dispatch mode that counts the bytes of the tensors created inside it, for as long as they live.

    The mode does not see the kernels' own workspace. A meta tensor counts as no bytes, although its storage reports some.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._now = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind not in (Tensor, torch.nn.Parameter) for kind in types):
            return NotImplemented  # a tensor subclass has no values of its own: the tensors inside it are counted
        made = func(*args, **(kwargs or {}))
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        for tensor in tree_leaves(made):
            if isinstance(tensor, Tensor) and not tensor.is_meta:
                storage = tensor.untyped_storage()
                key, nbytes = storage._cdata, storage.nbytes()
                if key not in given and key not in self._seen:
                    self._seen.add(key)
                    self._now += nbytes
                    self.peak = max(self.peak, self._now)
                    weakref.finalize(storage, self._gone, key, nbytes)
        return made

    def _gone(self, key: int, nbytes: int) -> None:
        self._seen.discard(key)
        self._now -= nbytes


@torch.no_grad()
def peak_bytes(work: Callable[[], object]) -> int:
    """Return the peak number of bytes of tensors that `work` creates and that are alive at the same time."""
    with Allocations() as allocations:
        work()
    return allocations.peak
