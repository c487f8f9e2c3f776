"""What a piece of work holds in tensors at the most."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Allocations(TorchDispatchMode):
    """Counts the bytes of tensors made inside, as long as they live; kernels' own working space is not seen.

    A tensor on the meta device has none, though it says so of its storage.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._now = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind not in (Tensor, torch.nn.Parameter) for kind in types):
            return NotImplemented  # such a tensor has no values of its own: what it is made of is counted
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
    """Bytes of tensors alive at the same time at the most, of those made while `work` runs."""
    with Allocations() as allocations:
        work()
    return allocations.peak
