"""Where a rank has the weights of a module, and which part of each parameter is its own to fill and to change."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Run:
    """A run of a parameter's elements, flat, from element `start` on; what is written into `values` is in the weights."""

    values: Tensor
    start: int = 0

    @property
    def stop(self) -> int:
        """The element behind the last."""
        return self.start + self.values.numel()


class Store(ABC):
    """The weights of a module that was built on the meta device.

    `shared` says whether ranks share out a parameter's elements, wherever its rows begin.
    """

    shared: bool

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of the rank's device that they need at the least; known before they take any."""

    @property
    def moving(self) -> int:
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

    def fit(self, room: int) -> int:
        """Use at most so many bytes of the device beyond `nbytes`, and as many as are of use; those that are left."""
        return room

    @abstractmethod
    def materialise(self, device: torch.device) -> None:
        """Take memory for them; what it holds is to be filled, but for a module's buffers that have values."""

    @abstractmethod
    def move(self, device: torch.device) -> None:
        """Take them to another device."""

    @abstractmethod
    def run(self, name: str) -> Run:
        """Which elements of a parameter are this rank's to fill and to change."""

    @abstractmethod
    def full(self, name: str) -> Tensor:
        """A whole parameter, not to be written to. A collective where ranks share it."""

    def settle(self) -> None:  # noqa: B027 - most have nothing to wait for
        """Wait until all ranks have written what they have to. A collective where they write into the same memory."""


class Whole(Store):
    """All of a module's weights, on this rank alone."""

    shared = False

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        # once: a rank asks for those of all models that it holds at every request
        self._nbytes = sum(tensor.nbytes for tensor in chain(module.parameters(), module.buffers()))

    @property
    def nbytes(self) -> int:
        """Of parameters and buffers."""
        return self._nbytes

    def materialise(self, device: torch.device) -> None:
        """Of every parameter and buffer."""
        made = [
            (part, name, buffer.to(device))
            for part in self._module.modules()
            for name, buffer in part.named_buffers(recurse=False)
            if not buffer.is_meta
        ]
        self._module.to_empty(device=device)
        for part, name, buffer in made:
            part._buffers[name] = buffer

    def move(self, device: torch.device) -> None:
        """All of them."""
        self._module.to(device)

    def run(self, name: str) -> Run:
        """All of it."""
        return Run(self._module.get_parameter(name).data.view(-1))

    def full(self, name: str) -> Tensor:
        """As it is."""
        return self._module.get_parameter(name).data
