"""Functions of a declaration that are data, so that it can be kept and sent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.utils._pytree import tree_leaves

from .declaration import Attention
from .picture import Picture


@dataclass(frozen=True)
class Constant:
    """Of a model: the same for all."""

    value: Any

    def __call__(self, model: Any) -> Any:
        """The value, whatever the model."""
        return self.value


@dataclass(frozen=True)
class StartAt:
    """Where a run of tokens begins: always at this place."""

    place: int

    def __call__(self, length: int, picture: int) -> int:
        """The place, whatever the numbers of tokens."""
        return self.place


@dataclass(frozen=True)
class LengthLess:
    """Where a run of tokens begins that ends with its stream: its length less the picture's tokens, padded to a multiple."""

    multiple: int

    def __call__(self, length: int, picture: int) -> int:
        """Of a stream of `length` tokens, `picture` of them the picture's."""
        return length - -(-picture // self.multiple) * self.multiple


@dataclass(frozen=True)
class Behind:
    """How many tokens of `step` latent values are made of the latents of these names, which may be in lists."""

    names: tuple[str, ...]
    step: tuple[int, ...]

    def __call__(self, arguments: Mapping[str, Any]) -> int:
        """Of what a model is given besides latent and timestep."""
        latents = tree_leaves([arguments.get(name) for name in self.names])
        return sum(Picture(tuple(latent.shape), self.step).tokens for latent in latents if latent is not None)


@dataclass(frozen=True)
class Turns:
    """Blocks that run as one: each of the list `path`, with those of the list `beside` behind it whose place in `path` it has.

    `places` are as many as the list `beside` has members in the model that it is said of. Of a shorter one those that have no
    place, which never run, count with the first block.
    """

    path: str
    beside: str
    places: tuple[int, ...]

    @property
    def second(self) -> int:
        """The place of the second one of the other list, if it has two."""
        return max(self.places[:2], default=0)

    def __call__(self, model: nn.Module) -> list[list[str]]:
        """The names of the blocks of each unit."""
        units = [[f"{self.path}.{number}"] for number, _ in enumerate(model.get_submodule(self.path).children())]
        for number, _ in enumerate(model.get_submodule(self.beside).children()):
            placed = number < len(self.places) and self.places[number] < len(units)
            unit = units[self.places[number] if placed else 0]
            unit.insert(len(unit) if placed else 0, f"{self.beside}.{number}")
        return units


@dataclass(frozen=True)
class Chosen:
    """The attentions of a block: one kind's where it has a submodule of this name, else the other's."""

    mark: str
    having: tuple[Attention, ...]
    without: tuple[Attention, ...]

    def __call__(self, block: nn.Module) -> tuple[Attention, ...]:
        """Those of one block."""
        return self.having if self.mark in dict(block.named_modules()) else self.without
