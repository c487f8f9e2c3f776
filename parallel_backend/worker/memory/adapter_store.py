"""A rank's store of adapters that requests name. The host sends each tensor once and says when to drop it."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from ...weights.adapters.lora import NONE, AdapterSet, decode_changes
from ...wire.to_worker import RECIPE, StoreAdaptersRequest


class AdapterStore:
    """The tensors of adapters by id, in host memory, and the last recipe."""

    def __init__(self) -> None:
        self._tensors: dict[str, Tensor] = {}
        self._last = NONE

    def learn(self, message: StoreAdaptersRequest, tensors: Mapping[str, Tensor]) -> None:
        """Add the tensors and the recipe that the host sent, and drop those that it names."""
        for name in message.forget:
            del self._tensors[name]
        self._tensors |= {name: tensor for name, tensor in tensors.items() if name != RECIPE}
        if RECIPE in tensors:
            changes = decode_changes(tensors[RECIPE].numpy().tobytes())
            self._last = AdapterSet(changes.recipe, self._tensors, changes.networks)

    def named(self, id: str) -> AdapterSet:
        """Return the adapters of the last recipe, which must have this id; no adapters for an empty id."""
        adapters = self._last if id else NONE
        assert adapters.id == id, "the host names adapters it has not sent"
        return adapters
