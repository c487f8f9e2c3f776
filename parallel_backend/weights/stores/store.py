"""The store of a module's weights on a rank, and the part of each parameter that the rank fills and changes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class ParameterRun:
    """A run of a parameter's flat elements, from element `start` on. Values written to `values` are in the weights."""

    values: Tensor
    start: int = 0

    @property
    def stop(self) -> int:
        """Return the element after the last."""
        return self.start + self.values.numel()


class WeightStore(ABC):
    """The weights of a module that was built on the meta device.

    Attributes:
        shared: True if ranks divide a parameter's elements, wherever its rows begin.
    """

    shared: bool

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Return the least number of bytes that the weights need on the rank's device. It is known before they take any."""

    @property
    def movable(self) -> int:
        """Return the part of `nbytes` that is in use between forwards too, and that moves with the weights."""
        return self.nbytes

    @property
    def beyond(self) -> int:
        """Return the bytes of the device that the weights use beyond `nbytes` and can give up at any time."""
        return 0

    @property
    def kept(self) -> int:
        """Return the bytes of host memory that this rank has for the weights, wherever they are."""
        return 0

    @property
    def idle(self) -> int:
        """Return the bytes of host memory that this rank accounts for and nobody reads.

        The memory is kept for the next time that the weights leave devices.
        """
        return 0

    def fit(self, spare: int) -> int:
        """Use at most `spare` bytes of the device beyond `nbytes`, as many as are useful, and return the bytes left over."""
        return spare

    @abstractmethod
    def materialise(self, device: torch.device) -> None:
        """Allocate the weights. Their values are not set, except for buffers of the module that have values."""

    def leaving(self, here: bool) -> int:
        """Return the bytes of host memory that this rank accounts for if the weights leave devices now.

        Bytes of `idle` that the weights take are included, and are not idle any more. This is a collective of the ranks that
        share a copy in host memory, as is `leave`, which comes next.

        Args:
            here: True if the weights leave this rank's device.
        """
        return self.movable if here else 0

    @abstractmethod
    def leave(self, here: bool) -> None:
        """Move the weights to host memory. They leave this rank's device if `here` is True."""

    @abstractmethod
    def come_back(self) -> None:
        """Move the weights back to the device that they left."""

    def stay(self) -> None:  # noqa: B027 - most have nothing to give up
        """Record that the weights are on the devices of all ranks. A copy kept for other ranks becomes idle, or is freed."""

    def give_up(self) -> None:  # noqa: B027 - most have nothing to give up
        """Free the idle memory."""

    @abstractmethod
    def run(self, name: str) -> ParameterRun:
        """Return the elements of a parameter that this rank fills and changes."""

    @abstractmethod
    def full(self, name: str) -> Tensor:
        """Return a whole parameter, which must not be written to. This is a collective if ranks share the parameter."""

    def settle(self) -> None:  # noqa: B027 - most have nothing to wait for
        """Wait until all ranks have written their parts. This is a collective if they write into the same memory."""


class BlockAccess:
    """Contexts that make the weights of blocks usable during model calls, forwards and blocks.

    This base class always has all blocks and does nothing.
    """

    def model_call(self, forwards: int) -> AbstractContextManager[None]:
        """Enclose a model call of `forwards` forwards. Other ranks may run another number of forwards.

        This is a collective if ranks share weights.
        """
        return nullcontext()

    def forward(self) -> AbstractContextManager[None]:
        """Enclose one forward."""
        return nullcontext()

    def block(self, index: int) -> AbstractContextManager[None]:
        """Enclose the run of a block, whose parameters are whole inside the context."""
        return nullcontext()
