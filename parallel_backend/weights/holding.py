"""How a rank makes the weights of its blocks usable, one after the other."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol


class Holding(Protocol):
    """Makes the weights of a block usable."""

    def block(self, index: int) -> AbstractContextManager[None]:
        """While inside, the block's parameters are whole."""


class Replicated:
    """Every rank holds its blocks whole."""

    def block(self, index: int) -> AbstractContextManager[None]:
        """Nothing to do."""
        return nullcontext()
