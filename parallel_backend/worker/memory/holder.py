"""What a rank holds: models and parts of models, several at once; the least recently used makes way for the next."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from itertools import chain
from typing import Any, Protocol, TypeVar

from torch import nn
from torch.distributed.tensor import DTensor

from ...diffusion import ModelSpec
from ..process.status import Status
from .rank_memory import Allowance, Memory, OutOfMemory


class Part(Protocol):
    """Something with weights: a stage of a model, a part of a VAE.

    `module` is built on the meta device with its final dtypes, so that its size is known before it takes any memory.
    """

    module: nn.Module

    def fill(self) -> None:
        """Give the module memory on the rank's device and load it. May communicate."""


P = TypeVar("P", bound=Part)


@dataclass
class _Held:
    part: Any
    arrangement: Hashable
    nbytes: int
    on_device: bool


class Holder:
    """One part a model, on the device or, once it had to leave it, in host memory while there is room.

    Every rank holds, moves and drops the same things in the same order, because loading may communicate: whether there
    is room is agreed on.

    Args:
        memory: of this rank's device.
        agree: True on all ranks if it was given True on all of them; a collective.
        status: told of phases.
    """

    def __init__(self, memory: Memory, agree: Callable[[bool], bool], status: Status) -> None:
        self._memory = memory
        self._agree = agree
        self._status = status
        self._held: dict[ModelSpec, _Held] = {}  # from the least to the most recently used
        self._limit = 0
        self.wanted = 0
        """Bytes of the part last asked for, held or not."""
        self.restored = 0
        """Bytes brought back from host memory since it was last set to 0."""

    def on_device(self) -> dict[ModelSpec, int]:
        """Bytes of weights on the device by model."""
        return self._sizes(on_device=True)

    def on_host(self) -> dict[ModelSpec, int]:
        """Bytes of weights in host memory by model."""
        return self._sizes(on_device=False)

    def hold(self, model: ModelSpec, arrangement: Hashable, build: Callable[[], P], allowance: Allowance) -> P:
        """A part on the device, ready for use. A collective.

        Args:
            model: whose part it is.
            arrangement: which rank holds what of it, the same on all ranks; a new one takes the place of the old.
            build: makes this rank's part, without data; called where it is not held yet.
            allowance: what this rank may use of its device.

        Raises:
            OutOfMemory: the part is larger than the allowance.
        """
        self._limit = allowance.limit
        self._memory.limit(allowance.limit)
        held = self._held.pop(model, None)
        if held is None or held.arrangement != arrangement:
            held = None
            self._memory.give_back()
            part: P = build()
            held = _Held(part, arrangement, bytes_of(part.module), on_device=False)
            self._make_room(held, allowance)
            self._status.enter("loading the model")
            part.fill()
            self._memory.give_back()
        elif not held.on_device:
            self._make_room(held, allowance)
            self._status.enter("restoring the model from host memory")
            self._memory.to_device(held.part.module)
            self.restored += held.nbytes
        else:
            self._make_room(held, allowance)
        held.on_device = True
        self._held[model] = held
        return held.part  # type: ignore[no-any-return]

    def free(self) -> int:
        """Bytes still to be had on the device, under the limit last given."""
        free = self._memory.free_on_device()
        return min(free, self._limit - sum(self.on_device().values())) if self._limit else free

    def release(self, model: ModelSpec) -> None:
        """Take a model off the device, into host memory if there is room. A collective."""
        self._status.enter("releasing the model")
        if model in self._held and self._held[model].on_device:
            self._take_off(model)

    def _make_room(self, wanted: _Held, allowance: Allowance) -> None:
        """Take other parts off the device, the least recently used first, until this one fits or is left alone."""
        self._status.enter("making room for the model")
        self.wanted = wanted.nbytes
        while not self._agree(self._fits(wanted, allowance)):
            oldest = next((spec for spec, held in self._held.items() if held.on_device and held is not wanted), None)
            if oldest is None:
                break
            self._take_off(oldest)
        if allowance.limit and wanted.nbytes > allowance.limit:
            raise OutOfMemory(wanted.nbytes, allowance.limit)

    def _fits(self, wanted: _Held, allowance: Allowance) -> bool:
        others = sum(held.nbytes for held in self._held.values() if held.on_device and held is not wanted)
        within = not allowance.limit or others + wanted.nbytes + allowance.working <= allowance.limit
        needed = allowance.working + (0 if wanted.on_device else wanted.nbytes)
        return within and needed <= self._memory.free_on_device() // allowance.sharers

    def _take_off(self, model: ModelSpec) -> None:
        """Move a part into host memory; parts there that are older leave it for this one. Without room it is dropped."""
        held = self._held[model]
        while not self._agree(self._memory.has_host_room(held.nbytes)):
            oldest = next((spec for spec, other in self._held.items() if not other.on_device), model)
            del self._held[oldest]
            self._memory.give_back()
            if oldest == model:
                return
        self._memory.to_host(held.part.module)
        held.on_device = False

    def _sizes(self, on_device: bool) -> dict[ModelSpec, int]:
        return {model: held.nbytes for model, held in self._held.items() if held.on_device == on_device}


def bytes_of(module: nn.Module) -> int:
    """Bytes of a module's parameters and buffers on this rank; of a shard, only the shard's."""
    tensors = chain(module.parameters(), module.buffers())
    return sum(tensor.to_local().nbytes if isinstance(tensor, DTensor) else tensor.nbytes for tensor in tensors)
