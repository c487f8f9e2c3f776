"""The models and parts of models that a rank holds, several at once. The least recently used one makes room for the next."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from ...diffusion import ModelSpec
from ...errors import Refused
from ...plan.advice import gigabytes
from ...weights.stores.store import WeightStore
from ..process.status import RankProgress
from .rank_memory import Allowance, OutOfMemory, RankMemory


class Part(Protocol):
    """An object with weights: a stage of a model, or an autoencoder.

    The size of the weights in `store` is known before they take any memory.
    """

    store: WeightStore

    def fill(self) -> None:
        """Give the module memory on the rank's device and load the weights. May be a collective."""


P = TypeVar("P", bound=Part)


@dataclass
class _HeldPart:
    """A part that the rank holds, with the location of its weights."""

    part: Any
    arrangement: Hashable
    """The arrangement that the part was built for. A part for another arrangement replaces it."""
    on_device: bool = False
    somewhere: bool = False
    """True if the part is on the device of any rank."""
    reserved_host_bytes: int = 0
    """Bytes of host memory that this rank accounts for since the part has left devices."""

    @property
    def store(self) -> WeightStore:
        return self.part.store  # type: ignore[no-any-return]

    @property
    def device_bytes(self) -> int:
        """Return the bytes of the device that the part takes now."""
        return self.store.movable + self.store.beyond if self.on_device else 0

    @property
    def on_host(self) -> int:
        """Return the bytes of host memory that the part takes now."""
        return self.store.kept + self.reserved_host_bytes + self.store.idle


class ModelHolder:
    """The holder of one part for each model, on the device or in host memory.

    A part moves to host memory when it has to leave the device, if there is room. Every rank holds, moves and drops the same
    models in the same order, because loading may be a collective. So the ranks decide together if there is room.

    Args:
        memory: the memory of this rank's device.
        all_true: returns True on all ranks if all ranks pass True. A collective.
        status: records phases.
    """

    def __init__(self, memory: RankMemory, all_true: Callable[[bool], bool], status: RankProgress) -> None:
        self._memory = memory
        self._all_true = all_true
        self._status = status
        self._entries: dict[ModelSpec, _HeldPart] = {}  # from the least to the most recently used
        self._limit = 0
        self.requested_bytes = 0
        """Bytes of the part that was requested last, also if it did not fit."""
        self.restored = 0
        """Bytes moved back from host memory since the counter was last set to 0."""
        self.spare = 0
        """Bytes of the device beyond the part that was requested last and the estimated need of its work."""

    def on_device(self) -> dict[ModelSpec, int]:
        """Return the bytes of weights on the device by model."""
        return {model: entry.device_bytes for model, entry in self._entries.items() if entry.on_device}

    def on_host(self) -> dict[ModelSpec, int]:
        """Return the bytes of weights in host memory by model."""
        return {model: entry.on_host for model, entry in self._entries.items() if entry.on_host}

    def hold(self, model: ModelSpec, arrangement: Hashable, build: Callable[[], P], allowance: Allowance) -> P:
        """Return a part on the device, ready for use. A collective.

        Args:
            model: the model of the part.
            arrangement: identifies the division of the model over ranks, the same on all ranks. A part of another arrangement
                is replaced.
            build: makes this rank's part without data. Called if the rank does not hold the part yet.
            allowance: the memory that this rank may use of its device.

        Raises:
            OutOfMemory: the part is larger than the allowance.
            Refused: the host has too little memory for streamed weights.
        """
        self._limit = allowance.limit
        self._memory.limit(allowance.limit)
        entry = self._entries.pop(model, None)
        if entry is None or entry.arrangement != arrangement:
            entry = None
            self._memory.give_back()
            part: P = build()
            entry = _HeldPart(part, arrangement)
            self._make_room(entry, allowance)
            self._make_host_room(part.store.kept)
            self._status.enter("loading the model")
            part.fill()
            self._memory.give_back()
        else:
            self._make_room(entry, allowance)
            if not entry.on_device:
                self._status.enter("restoring the model from host memory")
                entry.store.come_back()
                self.restored += entry.store.movable
            entry.store.stay()
            entry.reserved_host_bytes = 0
        entry.on_device = entry.somewhere = True
        self._entries[model] = entry
        self._keep_what_is_idle()
        self.spare = entry.store.fit(self._spare(entry, allowance))
        return entry.part  # type: ignore[no-any-return]

    def free(self) -> int:
        """Return the bytes that can still be allocated on the device under the last limit."""
        free = self._memory.free_on_device()
        return min(free, self._limit - sum(self.on_device().values())) if self._limit else free

    def release(self, model: ModelSpec, here: bool = True) -> None:
        """Take a model off the device, into host memory if there is room. A collective.

        Args:
            here: True if the model leaves this rank's device. Some ranks may keep it.
        """
        self._status.enter("releasing the model")
        if model in self._entries and self._entries[model].somewhere:
            self._take_off(model, here)

    def drop(self, model: ModelSpec) -> None:
        """Drop a model's part, whose weights may differ from its file. All ranks do this."""
        self._status.enter("releasing the model")
        self._entries.pop(model, None)
        self._memory.give_back()

    def _make_room(self, entry: _HeldPart, allowance: Allowance) -> None:
        """Take other parts off the device, the least recently used first, until this part fits or no other part is left."""
        self._status.enter("making room for the model")
        self.requested_bytes = entry.store.nbytes
        while not self._all_true(self._fits(entry, allowance)):
            oldest = next((spec for spec, part in self._entries.items() if part.somewhere and part is not entry), None)
            if oldest is None:
                break
            self._take_off(oldest)
        if allowance.limit and entry.store.nbytes > allowance.limit:
            raise OutOfMemory(entry.store.nbytes, allowance.limit)

    def _make_host_room(self, host_bytes: int) -> None:
        """Drop parts in host memory, the least recently used first, until `host_bytes` fit.

        Raises:
            Refused: they do not fit even then.
        """
        while host_bytes and not self._all_true(self._memory.has_host_room(host_bytes)):
            if self._give_up_what_is_idle():
                continue
            oldest = next((spec for spec, entry in self._entries.items() if not entry.somewhere), None)
            if oldest is None:
                raise Refused(
                    f"weights streamed takes {gigabytes(host_bytes)} of the computer's memory for each worker, and too little is "
                    "free: close other programs, use smaller weights (fp8, GGUF) or more machines, or set weights to sharded."
                )
            del self._entries[oldest]
            self._memory.give_back()

    def _fits(self, entry: _HeldPart, allowance: Allowance) -> bool:
        store, other_bytes = entry.store, self._other_bytes(entry)
        in_limit = not allowance.limit or other_bytes + store.nbytes + allowance.working <= allowance.limit
        needed = allowance.working + store.nbytes - entry.device_bytes
        return in_limit and needed <= self._memory.free_on_device() // allowance.sharers

    def _spare(self, entry: _HeldPart, allowance: Allowance) -> int:
        """Return the bytes that remain beyond the smallest need of a part and its work."""
        least = entry.store.nbytes + allowance.working
        spare = self._memory.free_on_device() // allowance.sharers + entry.device_bytes - least
        if allowance.limit:
            spare = min(spare, allowance.limit - self._other_bytes(entry) - least)
        return max(0, spare)

    def _other_bytes(self, than: _HeldPart) -> int:
        return sum(entry.device_bytes for entry in self._entries.values() if entry is not than)

    def _take_off(self, model: ModelSpec, here: bool = True) -> None:
        """Move a part into host memory. Older parts there are dropped if it needs the room.

        Without room, all ranks drop the part, because only all ranks together can load it again.
        """
        entry = self._entries[model]
        leaves = here and entry.on_device
        idle = entry.store.idle
        needed = entry.store.leaving(leaves)
        more = needed - (idle - entry.store.idle)
        while not self._all_true(more <= 0 or self._memory.has_host_room(more)):
            if self._give_up_what_is_idle():
                continue
            oldest = next((spec for spec, candidate in self._entries.items() if not candidate.somewhere), model)
            del self._entries[oldest]
            self._memory.give_back()
            if oldest == model:
                return
        self._memory.to_host(entry.store, leaves)
        entry.reserved_host_bytes += needed
        entry.on_device = entry.on_device and not leaves
        entry.somewhere = not self._all_true(not entry.on_device)

    def _keep_what_is_idle(self) -> None:
        """Release idle host memory if less than the same amount is free. A collective.

        Other programs on the machine may need it.
        """
        for entry in self._entries.values():
            idle = entry.store.idle
            if not self._all_true(not idle or self._memory.has_host_room(idle)):
                entry.store.give_up()

    def _give_up_what_is_idle(self) -> bool:
        """Release idle host memory. Return True if any rank had some. A collective."""
        if self._all_true(not any(entry.store.idle for entry in self._entries.values())):
            return False
        for entry in self._entries.values():
            entry.store.give_up()
        return True
