"""What a rank knows of the adapters that requests name: the host sends each tensor once and says when to forget it."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from ...weights.adapters.lora import NONE, AdapterSet, decode_changes
from ...wire.to_worker import RECIPE, StoreAdaptersRequest


class AdapterStore:
    """Tensors by id, in host memory, and the last recipe."""

    def __init__(self) -> None:
        self._tensors: dict[str, Tensor] = {}
        self._last = NONE

    def learn(self, message: StoreAdaptersRequest, tensors: Mapping[str, Tensor]) -> None:
        """Take in what the host sent."""
        for name in message.forget:
            del self._tensors[name]
        self._tensors |= {name: tensor for name, tensor in tensors.items() if name != RECIPE}
        if RECIPE in tensors:
            changes = decode_changes(tensors[RECIPE].numpy().tobytes())
            self._last = AdapterSet(changes.recipe, self._tensors, changes.networks)

    def named(self, id: str) -> AdapterSet:
        """The adapters that a request names."""
        adapters = self._last if id else NONE
        assert adapters.id == id, "the host names adapters it has not sent"
        return adapters
