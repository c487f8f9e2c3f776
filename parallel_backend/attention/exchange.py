"""Ulysses' all-to-all: from a split over tokens to a split over heads and back (DeepSpeed-Ulysses, arXiv 2309.14509).

Tokens and heads may be split unevenly. Where heads of queries share heads of keys and values, a rank gets those that its own
share. The order of tokens inside a block does not matter to attention, because positions are applied to q and k beforehand.
What travels has tokens outermost, so that the pieces of all ranks behind each
other are the sequence, and the pieces for all ranks are the result: nothing is moved where heads are apart.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..layout import SequenceSplit, length
from ..mesh import Mesh


class HeadExchange:
    """The exchange for the tokens of one split."""

    def __init__(self, mesh: Mesh, split: SequenceSplit) -> None:
        self._axis = mesh.ulysses
        self._heads = split.head_counts()
        self._tokens = split.ulysses_tokens(mesh.ring.rank)
        self._even = len(set(self._heads)) == 1
        self._apart = self._even and sum(split.kv_counts()) * split.group == split.heads
        self._runs = list(zip(split.head_runs(), split.kv_runs(), split.kv_runs(), strict=True))

    def to_heads(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """From `[batch, local tokens, heads, head_dim]` to `[batch, the ring rank's tokens, local heads, head_dim]`."""
        axis = self._axis
        if axis.size == 1:
            return q, k, v
        batch, local, _, head_dim = q.shape
        row = batch * head_dim
        heads = [[length(run) for run in runs] for runs in self._runs]
        mine = heads[axis.rank]
        send_sizes = [row * local * sum(theirs) for theirs in heads]
        send = q.new_empty(sum(send_sizes))
        if self._apart:
            views = send.view(axis.size, local, batch, sum(mine), head_dim).split(mine, dim=3)
            for part, view in zip((q, k, v), views, strict=True):
                view.copy_(part.unflatten(2, (axis.size, view.shape[3])).permute(2, 1, 0, 3, 4))
        else:
            for piece, runs, theirs in zip(send.split(send_sizes), self._runs, heads, strict=True):
                views = piece.view(local, batch, sum(theirs), head_dim).split(theirs, dim=2)
                for part, run, view in zip((q, k, v), runs, views, strict=True):
                    view.copy_(part[:, :, run].transpose(0, 1))
        received = axis.all_to_all(send, send_sizes, [row * n * sum(mine) for n in self._tokens])
        every = received.view(sum(self._tokens), batch, sum(mine), head_dim).transpose(0, 1)
        q, k, v = every.split(mine, dim=2)
        return q, k, v

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
