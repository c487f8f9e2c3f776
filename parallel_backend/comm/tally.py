"""Tally: counts the operations that a rank issues in one request, so that ranks can be compared when a request fails."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch.distributed as dist


class OperationKind(NamedTuple):
    """A kind of operation: the communicator's name and the world ranks that take part."""

    name: str
    ranks: tuple[int, ...]


@dataclass
class Tally:
    """The operations that this rank has issued since `reset`, and the asynchronous ones that it has not waited for."""

    issued: Counter[OperationKind] = field(default_factory=Counter)
    _pending: dict[int, dist.Work] = field(default_factory=dict)

    def reset(self) -> None:
        """Forget all operations."""
        self.issued.clear()
        self._pending.clear()

    def count(self, name: str, ranks: Sequence[int]) -> None:
        """Count an operation of these world ranks."""
        self.issued[OperationKind(name, tuple(ranks))] += 1

    def add_pending(self, work: dist.Work) -> None:
        """Note an asynchronous operation."""
        self._pending[id(work)] = work

    def wait(self, work: dist.Work) -> None:
        """Wait for an asynchronous operation."""
        work.wait()
        self._pending.pop(id(work), None)

    def wait_for_all(self) -> None:
        """Wait for all asynchronous operations. The other ranks must have issued their counterparts."""
        for work in list(self._pending.values()):
            self.wait(work)
