"""Weights that a rank holds whole on its device. Off the devices, a machine holds one copy."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor, nn

from ...comm.communicator import Communicator
from ...comm.meter import Meter
from .host_copy import HOST, HostCopy, bring_back, digest, tensors_of
from .store import ParameterRun, WeightStore

ALONE = Communicator("alone", None, HOST, False, Meter())
"""Communicator of a rank that shares with no other rank."""


class ReplicatedStore(WeightStore):
    """A store of all of a module's weights on this rank's device.

    Off the devices, the weights are in memory that the sharers of a machine have together. The ranks that leave first write it.
    A rank that still has the weights on its device finds the copy when it leaves. Once all ranks have their weights back, the
    copy is freed, or, if it is pinned, its memory is kept for the next time. Ranks whose weights differ in a bit, as adapters
    merged by different GPUs may, keep a copy each. A single rank on a CPU has its weights in host memory anyway, so nothing
    moves.

    Args:
        sharers: the ranks of this machine that hold the same weights, on CPU tensors.
    """

    shared = False

    def __init__(self, module: nn.Module, sharers: Communicator = ALONE) -> None:
        self._module = module
        self._device = HOST
        self._sharers = self._sharing = sharers
        self._writers: tuple[int, ...] = ()
        self._copy: HostCopy | None = None
        self._idle: HostCopy | None = None
        self._is_off = False
        self._nbytes = self._now()  # once: every request asks for the bytes of all models

    @property
    def nbytes(self) -> int:
        """Return the bytes of all parameters and buffers."""
        return self._nbytes

    def materialise(self, device: torch.device) -> None:
        """Allocate every parameter and buffer on the device. Buffers that have values keep them."""
        self._device = device
        buffers = [
            (part, name, buffer.to(device))
            for part in self._module.modules()
            for name, buffer in part.named_buffers(recurse=False)
            if not buffer.is_meta
        ]
        self._module.to_empty(device=device)
        for part, name, buffer in buffers:
            part._buffers[name] = buffer

    @property
    def idle(self) -> int:
        """Return this rank's part of the memory of a copy that nobody reads now."""
        return 0 if self._idle is None else self._idle.part()

    def leaving(self, here: bool) -> int:
        """Return the bytes of this rank's part of the copy that is about to be made.

        They are 0 if there is a copy already, or if no sharer's weights leave. A rank whose weights differ from the others' has
        a copy of its own, and so accounts for all of it.
        """
        if self._copy is not None:
            return 0
        self._writers = tuple(rank for rank, (leaves,) in enumerate(self._gathered(int(here))) if leaves)
        if self._writers and not self._hold_the_same():
            self._sharing, self._writers = ALONE, (0,) if here else ()
        if self._writers and self._idle is not None and self._idle.fits(self._tensors(), self._sharing):
            self._copy, self._idle = self._idle, None
        return -(-self._now() // self._sharing.size) if self._writers else 0

    def leave(self, here: bool) -> None:
        """Take all weights off the device, into the machine's copy."""
        if self._idle is not None and not self._idle.fits(self._tensors(), self._sharing):
            self.give_up()  # all sharers do, whichever of them leaves
        if self._writers and not (self._sharing.size == 1 and self._device == HOST):
            if self._copy is None:
                self._copy = HostCopy(self._tensors(), self._sharing, self._device)
            self._copy.write(self._tensors(), self._writers)
        self._writers = ()
        if here and self._copy is not None:
            self._copy.take(self._module)
            self._is_off = True

    def come_back(self) -> None:
        """Bring all weights back to the device."""
        if self._is_off:
            bring_back(self._module, self._device)
            self._is_off = False

    def stay(self) -> None:
        """Keep the weights on the device. Of the copy, keep only the memory, where a GPU's rank has it pinned."""
        if self._copy is not None and self._device.type == "cuda":
            self._idle = self._copy
        self._copy, self._sharing = None, self._sharers

    def give_up(self) -> None:
        """Free the memory of an idle copy."""
        self._idle = None

    def run(self, name: str) -> ParameterRun:
        """Return all elements of the parameter, which are this rank's own."""
        return ParameterRun(self._module.get_parameter(name).data.view(-1))

    def full(self, name: str) -> Tensor:
        """Return the parameter itself, which every rank has whole."""
        return self._module.get_parameter(name).data

    def _now(self) -> int:
        return sum(tensor.nbytes for tensor in self._tensors())

    def _tensors(self) -> Collection[Tensor]:
        return tensors_of(self._module).values()

    def _hold_the_same(self) -> bool:
        """Return True if all sharers have the same bits. This is a collective."""
        if self._sharing.size == 1:
            return True
        return len(set(self._gathered(*digest(self._tensors(), self._device)))) == 1

    def _gathered(self, *numbers: int) -> list[tuple[int, ...]]:
        """Return the numbers of each sharer. All sharers pass equally many. This is a collective."""
        ours = torch.tensor([[[number] for number in numbers]])
        gathered = self._sharing.all_gather(ours, [len(numbers)] * self._sharing.size)[0, :, 0].tolist()
        return [tuple(gathered[first : first + len(numbers)]) for first in range(0, len(gathered), len(numbers))]
