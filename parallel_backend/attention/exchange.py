"""Ulysses' all-to-all: from a split over tokens to a split over heads and back (DeepSpeed-Ulysses, arXiv 2309.14509).

Tokens and heads may be split unevenly. The order of tokens inside a block does not matter to attention, because
positions are applied to q and k beforehand. What travels has tokens outermost, so that the pieces of all ranks behind each
other are the sequence, and the pieces for all ranks are the result: nothing is moved where heads are apart.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..layout import SequenceSplit
from ..mesh import Mesh


class HeadExchange:
    """The exchange for the tokens of one split."""

    def __init__(self, mesh: Mesh, split: SequenceSplit) -> None:
        self._axis = mesh.ulysses
        self._heads = split.head_counts()
        self._tokens = split.ulysses_tokens(mesh.ring.rank)
        self._even = len(set(self._heads)) == 1

    def to_heads(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """From `[batch, local tokens, heads, head_dim]` to `[batch, the ring rank's tokens, local heads, head_dim]`."""
        axis = self._axis
        if axis.size == 1:
            return q, k, v
        batch, local, heads, head_dim = q.shape
        row, mine = 3 * batch * head_dim, self._heads[axis.rank]
        send = q.new_empty(row * local * heads)
        send_sizes = [row * local * h for h in self._heads]
        for number, part in enumerate((q, k, v)):
            if self._even:
                by_rank = send.view(axis.size, local, 3, batch, mine, head_dim)
                by_rank[:, :, number].copy_(part.unflatten(2, (axis.size, mine)).permute(2, 1, 0, 3, 4))
                continue
            pieces = zip(send.split(send_sizes), part.split(self._heads, dim=2), strict=True)
            for piece, theirs in pieces:
                piece.view(local, 3, batch, theirs.shape[2], head_dim)[:, number].copy_(theirs.transpose(0, 1))
        received = axis.all_to_all(send, send_sizes, [row * n * mine for n in self._tokens])
        every = received.view(sum(self._tokens), 3, batch, mine, head_dim).permute(1, 2, 0, 3, 4)
        return every[0], every[1], every[2]

    def to_tokens(self, out: Tensor) -> Tensor:
        """`[batch, the ring rank's tokens, local heads, head_dim]` to `[batch, local tokens, heads, head_dim]`."""
        axis = self._axis
        if axis.size == 1:
            return out
        batch, _, mine, head_dim = out.shape
        row, local = batch * head_dim, self._tokens[axis.rank]
        sizes = [row * local * h for h in self._heads]
        received = axis.all_to_all(out.transpose(0, 1).reshape(-1), [row * n * mine for n in self._tokens], sizes)
        if self._even:
            by_rank = received.view(axis.size, local, batch, mine, head_dim)
            return by_rank.permute(2, 1, 0, 3, 4).reshape(batch, local, axis.size * mine, head_dim)
        pieces = zip(received.split(sizes), self._heads, strict=True)
        return torch.cat([piece.view(local, batch, h, head_dim) for piece, h in pieces], dim=2).transpose(0, 1)
