"""Attention of one sequence over ring x ulysses ranks, for any number of tokens and heads.

Inside, Ulysses (DeepSpeed-Ulysses, arXiv 2309.14509): an all-to-all turns a split over tokens into a split over heads
and back. Outside, Ring Attention (arXiv 2310.01889): blocks of keys and values travel round the ring while partial
results are merged by log-sum-exp. Tokens and heads may be split unevenly in both. The order of tokens inside a block
does not matter, because positions are applied to q and k beforehand.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..layout import TokenLayout
from ..mesh import Mesh
from .kernels import Kernel
from .merge import PartialAttention


class ParallelAttention:
    """Full (unmasked) attention where each rank holds its layout's tokens of q, k and v, with all heads."""

    def __init__(self, mesh: Mesh, layout: TokenLayout, kernel: Kernel) -> None:
        self._mesh = mesh
        self._layout = layout
        self._attend = kernel.attend

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """`[batch, local tokens, heads, head_dim]` each; returns the same shape."""
        q, k, v = self._to_heads(torch.stack((q, k, v)))
        return self._to_tokens(self._ring(q, k, v))

    def _ring(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ring = self._mesh.ring
        if q.shape[1] == 0 and ring.size == 1:
            return q
        partial = PartialAttention()
        block = torch.stack((k, v))
        tokens = self._layout.ring_tokens()
        for hop in range(ring.size):
            source = (ring.rank - hop) % ring.size
            wait: Callable[[], Tensor] | None = None
            if hop + 1 < ring.size:  # the next block is in flight while this one is computed
                upcoming = (source - 1) % ring.size
                shape = (2, k.shape[0], tokens[upcoming], *k.shape[2:])
                _, wait = ring.shift(block.reshape(-1), torch.Size(shape).numel())
            if q.shape[1] and block.shape[2]:
                partial.add(*self._attend(q, block[0], block[1]))
            if wait is not None:
                block = wait().view(shape)
        return partial.result() if q.shape[1] else q

    def _to_heads(self, qkv: Tensor) -> Tensor:
        """`[3, batch, local tokens, heads, head_dim]` to `[3, batch, the group's tokens, local heads, head_dim]`."""
        axis = self._mesh.ulysses
        if axis.size == 1:
            return qkv
        three, batch, local, _, head_dim = qkv.shape
        heads, tokens = self._layout.head_counts(), self._layout.ulysses_tokens(self._mesh.ring.rank)
        send = torch.cat([piece.reshape(-1) for piece in qkv.split(heads, dim=3)])
        row = three * batch * head_dim
        mine = heads[axis.rank]
        received = axis.all_to_all(send, [row * local * h for h in heads], [row * n * mine for n in tokens])
        pieces = received.split([row * n * mine for n in tokens])
        return torch.cat([p.view(three, batch, n, mine, head_dim) for p, n in zip(pieces, tokens, strict=True)], dim=2)

    def _to_tokens(self, out: Tensor) -> Tensor:
        """`[batch, the group's tokens, local heads, head_dim]` to `[batch, local tokens, heads, head_dim]`."""
        axis = self._mesh.ulysses
        if axis.size == 1:
            return out
        batch, _, mine, head_dim = out.shape
        heads, tokens = self._layout.head_counts(), self._layout.ulysses_tokens(self._mesh.ring.rank)
        send = torch.cat([piece.reshape(-1) for piece in out.split(tokens, dim=1)])
        row = batch * head_dim
        local = tokens[axis.rank]
        received = axis.all_to_all(send, [row * n * mine for n in tokens], [row * local * h for h in heads])
        pieces = received.split([row * local * h for h in heads])
        return torch.cat([p.view(batch, local, h, head_dim) for p, h in zip(pieces, heads, strict=True)], dim=2)
