"""Ulysses' all-to-all: from a split over tokens to a split over heads and back (DeepSpeed-Ulysses, arXiv 2309.14509).

Tokens and heads may be split unevenly. The order of tokens inside a block does not matter to attention, because
positions are applied to q and k beforehand.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..layout import SequenceSplit, TokenLayout
from ..mesh import Mesh


class HeadExchange:
    """The exchange for the tokens of one layout."""

    def __init__(self, mesh: Mesh, layout: SequenceSplit | TokenLayout) -> None:
        self._axis = mesh.ulysses
        self._heads = layout.head_counts()
        self._tokens = layout.ulysses_tokens(mesh.ring.rank)

    def to_heads(self, parts: tuple[Tensor, ...]) -> Tensor:
        """q, k and v from `[batch, local tokens, heads, head_dim]` to one tensor.

        Returns `[3, batch, the ring rank's tokens, local heads, head_dim]`.
        """
        axis = self._axis
        if axis.size == 1:
            return torch.stack(parts)
        batch, local, heads, head_dim = parts[0].shape
        row, mine = len(parts) * batch * head_dim, self._heads[axis.rank]
        send_sizes = [row * local * h for h in self._heads]
        send = parts[0].new_empty(row * local * heads)
        by_rank = zip(*(part.split(self._heads, dim=2) for part in parts), strict=True)
        for piece, theirs in zip(send.split(send_sizes), by_rank, strict=True):
            torch.stack(theirs, out=piece.view(len(parts), *theirs[0].shape))
        sizes = [row * n * mine for n in self._tokens]
        received = axis.all_to_all(send, send_sizes, sizes)
        pieces = zip(received.split(sizes), self._tokens, strict=True)
        return torch.cat([piece.view(len(parts), batch, n, mine, head_dim) for piece, n in pieces], dim=2)

    def to_tokens(self, out: Tensor) -> Tensor:
        """`[batch, the ring rank's tokens, local heads, head_dim]` to `[batch, local tokens, heads, head_dim]`."""
        axis = self._axis
        if axis.size == 1:
            return out
        batch, _, mine, head_dim = out.shape
        row, local = batch * head_dim, self._tokens[axis.rank]
        send_sizes = [row * n * mine for n in self._tokens]
        send = out.new_empty(sum(send_sizes))
        for piece, theirs in zip(send.split(send_sizes), out.split(self._tokens, dim=1), strict=True):
            piece.view(theirs.shape).copy_(theirs)
        sizes = [row * local * h for h in self._heads]
        received = axis.all_to_all(send, send_sizes, sizes)
        pieces = zip(received.split(sizes), self._heads, strict=True)
        return torch.cat([piece.view(batch, local, h, head_dim) for piece, h in pieces], dim=2)
