"""Where a rank has the weights of a module, and which part of each parameter is its own to fill and to change."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class ParameterRun:
    """A run of a parameter's elements, flat, from element `start` on; what is written into `values` is in the weights."""

    values: Tensor
    start: int = 0

    @property
    def stop(self) -> int:
        """The element behind the last."""
        return self.start + self.values.numel()


class WeightStore(ABC):
    """The weights of a module that was built on the meta device.

    `shared` says whether ranks share out a parameter's elements, wherever its rows begin.
    """

    shared: bool

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of the rank's device that they need at the least; known before they take any."""

    @property
    def movable(self) -> int:
        """Of these the bytes that are taken between forwards too, and move where the weights move."""
        return self.nbytes

    @property
    def beyond(self) -> int:
        """Bytes of the device that they take beyond `nbytes` and can give up at any time."""
        return 0

    @property
    def kept(self) -> int:
        """Bytes of host memory that this rank has for them wherever they are."""
        return 0

    @property
    def idle(self) -> int:
        """Bytes of host memory that this rank answers for and nobody reads, kept for the next time that they leave devices."""
        return 0

    def fit(self, spare: int) -> int:
        """Use at most so many bytes of the device beyond `nbytes`, and as many as are of use; those that are left."""
        return spare

    @abstractmethod
    def materialise(self, device: torch.device) -> None:
        """Take memory for them; what it holds is to be filled, but for a module's buffers that have values."""

    def leaving(self, here: bool) -> int:
        """Bytes of host memory that this rank answers for if they leave devices now, this rank's where `here` says so.

        Those of `idle` that they take are among them, and are idle no more. A collective of the ranks that have one copy
        there, as `leave` is, which comes next.
        """
        return self.movable if here else 0

    @abstractmethod
    def leave(self, here: bool) -> None:
        """Move them to host memory, off this rank's device where `here` says so."""

    @abstractmethod
    def come_back(self) -> None:
        """Move them back to the device that they left."""

    def stay(self) -> None:  # noqa: B027 - most have nothing to give up
        """What is kept for ranks that they left is idle, or given up: they are on the devices of all."""

    def give_up(self) -> None:  # noqa: B027 - most have nothing to give up
        """Free what is idle."""

    @abstractmethod
    def run(self, name: str) -> ParameterRun:
        """Which elements of a parameter are this rank's to fill and to change."""

    @abstractmethod
    def full(self, name: str) -> Tensor:
        """A whole parameter, not to be written to. A collective where ranks share it."""

    def settle(self) -> None:  # noqa: B027 - most have nothing to wait for
        """Wait until all ranks have written what they have to. A collective where they write into the same memory."""


class BlockAccess:
    """Makes the weights of blocks usable around model calls, forwards and blocks. This class has all blocks and does nothing."""

    def model_call(self, forwards: int) -> AbstractContextManager[None]:
        """Inside, this rank runs so many forwards, other ranks perhaps others. A collective where ranks share weights."""
        return nullcontext()

    def forward(self) -> AbstractContextManager[None]:
        """Inside, one forward runs."""
        return nullcontext()

    def block(self, index: int) -> AbstractContextManager[None]:
        """Inside, the block's parameters are whole."""
        return nullcontext()
