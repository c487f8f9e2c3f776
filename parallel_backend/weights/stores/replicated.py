"""Weights that a rank holds whole on its device; off it, a machine holds one copy."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor, nn

from ...comm.communicator import Communicator
from ...comm.meter import Meter
from .host_copy import HOST, HostCopy, bring_back, digest, tensors_of
from .store import ParameterRun, WeightStore

ALONE = Communicator("alone", None, HOST, False, Meter())
"""Of a rank that shares with no other."""


class ReplicatedStore(WeightStore):
    """All of a module's weights, on this rank's device.

    Off the devices they are in memory that the sharers of a machine have together, written by those that leave first; a rank
    that still has them on its device finds them there when it leaves. Once all have them back it is given up, or, where it is
    pinned, its memory kept for the next time. Ranks whose weights differ in a bit, as adapters merged by different GPUs may,
    keep a copy each. Alone on a CPU, where they are in host memory as it is, nothing moves.

    Args:
        sharers: the ranks of this machine that hold the same, on CPU tensors.
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
        self._nbytes = self._now()  # once: a rank asks for those of all models that it holds at every request

    @property
    def nbytes(self) -> int:
        """The bytes of all parameters and buffers."""
        return self._nbytes

    def materialise(self, device: torch.device) -> None:
        """Give every parameter and buffer memory on the device."""
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
        """Of the copy's memory, which nobody reads now."""
        return 0 if self._idle is None else self._idle.part()

    def leaving(self, here: bool) -> int:
        """All of them, or this rank's part of the machine's copy; nothing more where there is one."""
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
            self.give_up()  # all that share it do, whoever of them leaves
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
        """Keep the weights on the device; of the copy its memory alone, where a GPU's rank has it pinned."""
        if self._copy is not None and self._device.type == "cuda":
            self._idle = self._copy
        self._copy, self._sharing = None, self._sharers

    def give_up(self) -> None:
        """Give up the memory of an idle copy."""
        self._idle = None

    def run(self, name: str) -> ParameterRun:
        """All of the parameter's elements, which are this rank's own."""
        return ParameterRun(self._module.get_parameter(name).data.view(-1))

    def full(self, name: str) -> Tensor:
        """The parameter itself, which every rank has whole."""
        return self._module.get_parameter(name).data

    def _now(self) -> int:
        return sum(tensor.nbytes for tensor in self._tensors())

    def _tensors(self) -> Collection[Tensor]:
        return tensors_of(self._module).values()

    def _hold_the_same(self) -> bool:
        """Whether all that share have the same bits. A collective."""
        if self._sharing.size == 1:
            return True
        return len(set(self._gathered(*digest(self._tensors(), self._device)))) == 1

    def _gathered(self, *numbers: int) -> list[tuple[int, ...]]:
        """What each of those that share says; so many numbers. A collective."""
        ours = torch.tensor([[[number] for number in numbers]])
        gathered = self._sharing.all_gather(ours, [len(numbers)] * self._sharing.size)[0, :, 0].tolist()
        return [tuple(gathered[first : first + len(numbers)]) for first in range(0, len(gathered), len(numbers))]
