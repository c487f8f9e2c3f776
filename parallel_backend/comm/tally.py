"""Counting the operations that a rank issues in one request, so that ranks which fail can be compared."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch.distributed as dist


class Operations(NamedTuple):
    """One kind of operation: the communicator's name, and the ranks that take part in it, by their numbers in the world."""

    name: str
    ranks: tuple[int, ...]


@dataclass
class Tally:
    """The operations that this rank has issued since `begin`, and those that it has begun and not waited for."""

    issued: Counter[Operations] = field(default_factory=Counter)
    _begun: dict[int, dist.Work] = field(default_factory=dict)

    def begin(self) -> None:
        """Count from here."""
        self.issued.clear()
        self._begun.clear()

    def count(self, name: str, ranks: Sequence[int]) -> None:
        """Count an operation of these ranks."""
        self.issued[Operations(name, tuple(ranks))] += 1

    def start(self, work: dist.Work) -> None:
        """Note an operation that goes on while the rank does something else."""
        self._begun[id(work)] = work

    def wait(self, work: dist.Work) -> None:
        """Wait for an operation that has been started."""
        work.wait()
        self._begun.pop(id(work), None)

    def finish(self) -> None:
        """Wait for every operation that has been started. Each must have its counterpart on the other ranks."""
        for work in list(self._begun.values()):
            self.wait(work)
