"""Attention of one sequence over ring x ulysses ranks, for any number of tokens and heads.

Ulysses is inside, the ring outside. For a whole sequence, blocks of keys and values travel round the ring while partial
results are merged by log-sum-exp (Ring Attention, arXiv 2310.01889). For one patch against a cache that is split the
same way, the few queries travel instead and partial results come back.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import torch
from torch import Tensor

from ..comm.communicator import Communicator
from ..layout import SequenceSplit
from ..mesh import Mesh
from .cache import KVCache
from .exchange import HeadExchange
from .groups import of_groups
from .merge import PartialAttention
from .packages import Attend

Attention = Callable[[Hashable, Tensor, Tensor, Tensor], Tensor]
"""(block, q, k, v), each `[batch, local tokens, heads, head_dim]`, to attention of q's shape; heads are the split's."""


class WholeAttention:
    """Every token attends to every token of this call.

    Args:
        cache: if given, filled with the keys and values seen.
    """

    def __init__(self, mesh: Mesh, split: SequenceSplit, attend: Attend, cache: KVCache | None) -> None:
        self._ring = mesh.ring
        self._exchange = HeadExchange(mesh, split)
        self._tokens = split.ring_tokens()
        self._attend = of_groups(attend, split, mesh.ulysses.rank)
        self._cache = cache

    def __call__(self, block: Hashable, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention of the local tokens."""
        q, k, v = self._exchange.to_heads(q, k, v)
        if self._ring.size == 1 and self._cache is None:
            out = self._attend(q, k, v)[0] if q.numel() else q
        else:
            kv = torch.stack((k, v))
            if self._cache is not None:
                self._cache.fill(block, kv)
            out = around_the_ring(self._ring, self._tokens, self._attend, q, kv)
        return self._exchange.to_tokens(out)


def around_the_ring(ring: Communicator, tokens: Sequence[int], attend: Attend, q: Tensor, kv: Tensor) -> Tensor:
    """Attention of the local queries to the keys of all ring ranks. A collective.

    Args:
        tokens: how many keys each ring rank holds.
        q: `[batch, local queries, heads, head_dim]`.
        kv: `[2, batch, local keys, heads, head_dim]`, with the heads that `attend` takes.
    """
    partial = PartialAttention(q)
    for hop in range(ring.size):
        source = (ring.rank - hop) % ring.size
        wait: Callable[[], Tensor] | None = None
        if hop + 1 < ring.size:  # the next block is in flight while this one is computed
            shape = (2, q.shape[0], tokens[(source - 1) % ring.size], *kv.shape[3:])
            wait = ring.shift(kv.reshape(-1), torch.Size(shape).numel())
        if q.numel() and kv.numel():
            partial.add(*attend(q, kv[0], kv[1]))
        if wait is not None:
            kv = wait().view(shape)
    return partial.result()


class PatchAttention:
    """One patch's tokens, of which `split` is, attend to the newest keys that the stage holds; theirs go there first."""

    def __init__(self, mesh: Mesh, split: SequenceSplit, patch: int, attend: Attend, cache: KVCache) -> None:
        self._ring = mesh.ring
        self._exchange = HeadExchange(mesh, split)
        self._tokens = split.ring_tokens()
        self._patch = patch
        self._attend = of_groups(attend, split, mesh.ulysses.rank)
        self._cache = cache

    def __call__(self, block: Hashable, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention of the local tokens of the patch."""
        q, k, v = self._exchange.to_heads(q, k, v)
        kv = self._cache.update(block, self._patch, k, v)
        return self._exchange.to_tokens(self._over_the_ring(q, kv))

    def _over_the_ring(self, q: Tensor, kv: Tensor) -> Tensor:
        ring = self._ring
        if ring.size == 1:
            return self._attend(q, kv[0], kv[1])[0] if q.numel() else q
        everyone = ring.gather(q.flatten(2), self._tokens).unflatten(2, q.shape[2:])
        out, lse = (
            torch.zeros_like(everyone),
            everyone.new_full((*everyone.shape[:3], 1), -torch.inf, dtype=torch.float32),
        )
        if everyone.numel() and kv.numel():
            out, lse = self._attend(everyone, kv[0], kv[1])
            lse = lse.transpose(1, 2).unsqueeze(-1)
        partial = PartialAttention(q)
        for part, part_lse in zip(self._return(out), self._return(lse, "ring lse"), strict=True):
            partial.add(part, part_lse.squeeze(-1).transpose(1, 2))
        return partial.result()

    def _return(self, everyone: Tensor, kind: str = "") -> list[Tensor]:
        """Each ring rank's result for this rank's queries, from `[batch, all ranks' queries, heads, channels]`."""
        ring = self._ring
        batch, _, heads, channels = everyone.shape
        row, mine = batch * heads * channels, self._tokens[ring.rank]
        send = torch.cat([piece.reshape(-1) for piece in everyone.split(self._tokens, dim=1)])
        received = ring.all_to_all(send, [row * n for n in self._tokens], [row * mine] * ring.size, kind)
        return [piece.view(batch, mine, heads, channels) for piece in received.chunk(ring.size)] if mine else []
