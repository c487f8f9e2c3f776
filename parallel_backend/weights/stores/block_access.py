"""How a rank makes the weights of its blocks usable, one after the other."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext


class BlockAccess:
    """What has to be done for that around model calls, forwards and blocks: nothing, where every rank holds its blocks whole."""

    def model_call(self, forwards: int) -> AbstractContextManager[None]:
        """Inside, this rank runs so many forwards, other ranks perhaps others. A collective where ranks share weights."""
        return nullcontext()

    def forward(self) -> AbstractContextManager[None]:
        """Inside, one forward runs."""
        return nullcontext()

    def block(self, index: int) -> AbstractContextManager[None]:
        """Inside, the block's parameters are whole."""
        return nullcontext()
