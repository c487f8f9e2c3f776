"""The adapters that the workers of a group know, so that each tensor is sent once."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ...weights.adapters.lora import AdapterSet
from ...wire.to_worker import RECIPE, StoreAdaptersRequest

FRAME_BYTES = 256 << 20
"""Approximate number of bytes of tensors in one frame."""

SPARE_BYTES = 1 << 30
"""Bytes of tensors that every worker keeps besides those in use, for adapters that come back."""


class KnownAdapters:
    """A mirror of the workers' AdapterStore. The least recently used tensors are forgotten first."""

    def __init__(self) -> None:
        self._sizes: dict[str, int] = {}  # from the least to the most recently used
        self._recipe = ""

    def missing(self, adapters: AdapterSet) -> Iterator[tuple[StoreAdaptersRequest, dict[str, Tensor]]]:
        """Yield the messages that the workers need before a request that names these adapters."""
        if not adapters.id or adapters.id == self._recipe:
            return
        forget = self._forget(set(adapters.tensors))
        batch: dict[str, Tensor] = {}
        for name, tensor in adapters.tensors.items():
            if name not in self._sizes:
                batch[name] = tensor
                if sum(t.nbytes for t in batch.values()) >= FRAME_BYTES:
                    yield StoreAdaptersRequest(forget), batch
                    forget, batch = [], {}
            self._sizes[name] = self._sizes.pop(name, tensor.nbytes)
        recipe = torch.frombuffer(bytearray(adapters.encoded), dtype=torch.uint8)
        yield StoreAdaptersRequest(forget), batch | {RECIPE: recipe}
        self._recipe = adapters.id

    def _forget(self, used: set[str]) -> list[str]:
        spare = {name: size for name, size in self._sizes.items() if name not in used}
        forget: list[str] = []
        over = sum(spare.values()) - SPARE_BYTES
        for name, size in spare.items():
            if over <= 0:
                break
            forget.append(name)
            over -= size
            del self._sizes[name]
        return forget
