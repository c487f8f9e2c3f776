"""Attention of one sequence over ring x ulysses ranks, for any number of tokens and heads.

Ulysses is inside, the ring outside. For a whole sequence, blocks of keys and values travel round the ring while partial
results are merged by log-sum-exp (Ring Attention, arXiv 2310.01889). For one patch against a cache that is split the
same way, the few queries travel instead and partial results come back. Partial results are merged as FlashAttention's
online softmax does it (arXiv 2205.14135), in fp32.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from ..comm.communicator import Communicator
from ..layout import HeadRuns, SequenceSplit
from ..mesh import Mesh
from ..transfers import sent_to
from .exchange import HeadExchange, joined
from .packages import Attend
from .payload import EXACT, Payload

Attention = Callable[[Hashable, Tensor, Tensor, Tensor], Tensor]
"""(block, q, k, v), each `[batch, local tokens, heads, head_dim]`, to attention of q's shape; heads are the split's."""

HeadFunction = Callable[[slice, Tensor, Tensor, Tensor], Tensor]
"""(heads, q, k, v), of these heads the operands `[batch, all tokens, heads, head_dim]`, to attention of q's shape."""

Computed = TypeVar("Computed")


class PartialAttention:
    """The running result of one set of queries `[batch, queries, heads, head_dim]` over the key blocks seen so far."""

    def __init__(self, q: Tensor) -> None:
        self._empty = q
        self._out: Tensor | None = None
        self._lse = torch.empty(0)

    def add(self, out: Tensor, lse: Tensor) -> None:
        """Merge one block: out `[batch, queries, heads, head_dim]`, LSE `[batch, heads, queries]`, -inf for no keys."""
        lse = lse.transpose(1, 2).unsqueeze(-1).float()
        if self._out is None:
            self._out, self._lse = out, lse
            return
        share = torch.sigmoid(lse - self._lse).nan_to_num(0.0)  # nan: no keys on either side
        self._out = self._out.float().lerp(out.float(), share)
        self._lse = torch.logaddexp(self._lse, lse)

    def result(self) -> Tensor:
        """The attention output over all blocks, in the queries' dtype; empty for no queries."""
        return self._empty if self._out is None else self._out.to(self._empty.dtype)


class KVCache:
    """Keys and values of all tokens, for each block of this stage, kept from call to call for PipeFusion (arXiv 2405.14430).

    Split as attention is, nothing replicated: this rank's heads of Ulysses, this ring rank's tokens. `slots` are, for each
    patch, the places of its tokens among them, in the order in which a patch's own all-to-all delivers them; they move to
    the device when they are first used, for all that share the list.
    """

    def __init__(self, slots: list[Tensor]) -> None:
        self._slots = slots
        self._blocks: dict[Hashable, Tensor] = {}

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(block.nbytes for block in self._blocks.values())

    def fill(self, block: Hashable, kv: Tensor) -> None:
        """Keep the keys and values of a whole call: `[2, batch, tokens, heads, head_dim]`, from now on the cache's own."""
        self._blocks[block] = kv

    def update(self, block: Hashable, patch: int, k: Tensor, v: Tensor) -> Tensor:
        """Put in the fresh keys and values of one patch's chunk; returns all, newest of each token."""
        whole = self._blocks[block]
        slots = self._slots[patch] = sent_to(self._slots[patch], whole.device)
        whole[0].index_copy_(1, slots, k)
        whole[1].index_copy_(1, slots, v)
        return whole


def repeated_heads(
    attend: Callable[[Tensor, Tensor, Tensor], Computed], group: int, own: HeadRuns
) -> Callable[[Tensor, Tensor, Tensor], Computed]:
    """A kernel for some heads of a Ulysses rank, made of one that takes as many heads of k and v as of q.

    Heads of keys and values that `group` heads of queries share are so repeated last, behind exchange, ring and cache.
    """
    if group == 1:
        return attend
    skipped = own.q.start % group  # of its first group: they are the rank's before

    def attend_groups(q: Tensor, k: Tensor, v: Tensor) -> Computed:
        k, v = (x.repeat_interleave(group, dim=2)[:, :, skipped : skipped + q.shape[2]] for x in (k, v))
        return attend(q, k, v)

    return attend_groups


class WholeAttention:
    """Every token attends to every token of this call.

    Heads are exchanged and computed in chunks: while one is computed the next one's tokens arrive and the last one's result
    leaves. What is computed of each head stays the same.

    Args:
        chunks: at most so many; every rank has some heads in each.
        payload: how operands and results travel.
    """

    def __init__(
        self, mesh: Mesh, split: SequenceSplit, attend: Attend, chunks: int = 1, payload: Payload = EXACT
    ) -> None:
        self._ring = mesh.ring
        self._payload = payload
        self._to_heads = payload if mesh.ulysses.size > 1 else EXACT
        self._tokens = split.ring_tokens()
        runs = split.head_chunks(chunks)
        tokens = split.ulysses_tokens(mesh.ring.rank)
        self._exchanges = [HeadExchange(mesh.ulysses, tokens, split, chunk, behind=len(runs) > 1) for chunk in runs]
        self._heads = [chunk[mesh.ulysses.rank] for chunk in runs]
        self._attends = [repeated_heads(attend, split.group, heads) for heads in self._heads]

    def __call__(
        self,
        block: Hashable,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cache: KVCache | None = None,
        prefix: Tensor | None = None,
    ) -> Tensor:
        """Attention of the local tokens.

        Args:
            cache: if given, filled with the keys and values seen; it takes all heads, so there is one chunk.
            prefix: keys and values `[2, batch, tokens, heads, head_dim]` that every rank has, to which all tokens attend too.
        """
        assert cache is None or len(self._exchanges) == 1

        def compute(chunk: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            first = None if prefix is None else prefix[:, :, :, self._heads[chunk].kv]
            return self._computed(block, self._attends[chunk], q, k, v, cache, first)

        return in_chunks(self._exchanges, self._to_heads, q, k, v, compute)

    def _computed(
        self,
        block: Hashable,
        attend: Attend,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cache: KVCache | None,
        prefix: Tensor | None,
    ) -> Tensor:
        if self._ring.size == 1 and cache is None:
            k, v = (k, v) if prefix is None else (torch.cat(pair, dim=1) for pair in zip(prefix, (k, v), strict=True))
            return attend(q, k, v)[0] if q.numel() else q
        kv = torch.stack((k, v))
        if cache is not None:
            cache.fill(block, kv)
        return around_the_ring(self._ring, self._tokens, attend, q, kv, self._payload, prefix)


class FunctionAttention:
    """A function computes attention in the kernels' place, of all tokens in the model's order and some heads. No Ring.

    Args:
        order: where the tokens of the model's order lie among those of the ranks, one rank's behind the other's.
        keys_here: every rank has all keys and values, so that queries alone are exchanged.
        chunks, payload: as for WholeAttention.
    """

    def __init__(
        self,
        mesh: Mesh,
        split: SequenceSplit,
        order: Tensor,
        keys_here: bool,
        chunks: int = 1,
        payload: Payload = EXACT,
    ) -> None:
        assert mesh.ring.size == 1
        runs = split.head_chunks(chunks)
        self._to_heads = payload if mesh.ulysses.size > 1 else EXACT
        sent = [[HeadRuns(own.q, slice(0, 0)) for own in chunk] if keys_here else chunk for chunk in runs]
        tokens = split.ulysses_tokens(0)
        self._exchanges = [HeadExchange(mesh.ulysses, tokens, split, chunk, behind=len(runs) > 1) for chunk in sent]
        self._heads = [chunk[mesh.ulysses.rank] for chunk in runs]
        self._keys_here = keys_here
        self._group = split.group
        self._order, self._back = order, order.argsort()
        self._moved = not torch.equal(order, torch.arange(order.numel()))

    def __call__(self, function: HeadFunction, q: Tensor, k: Tensor, v: Tensor, prefix: Tensor | None = None) -> Tensor:
        """Attention of the local tokens; with a `prefix`, as WholeAttention takes it, before the keys of all ranks."""
        here = k, v

        def compute(chunk: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            if not q.numel():
                return q
            heads = self._heads[chunk]
            q = self._ordered(q)
            k, v = (x[:, :, heads.kv] for x in here) if self._keys_here else map(self._ordered, (k, v))
            if prefix is not None:
                own = prefix[:, :, :, heads.kv]
                k, v = (torch.cat(pair, dim=1) for pair in zip(own, (k, v), strict=True))
            out = repeated_heads(lambda q, k, v: function(heads.q, q, k, v), self._group, heads)(q, k, v)
            return out.index_select(1, self._back) if self._moved else out

        if self._keys_here:
            k = v = q[:, :, :0]
        return in_chunks(self._exchanges, self._to_heads, q, k, v, compute)

    def _ordered(self, x: Tensor) -> Tensor:
        if not self._moved:
            return x
        self._order, self._back = (sent_to(index, x.device) for index in (self._order, self._back))
        return x.index_select(1, self._order)


def in_chunks(
    exchanges: Sequence[HeadExchange],
    travel: Payload,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    compute: Callable[[int, Tensor, Tensor, Tensor], Tensor],
) -> Tensor:
    """Attention of the local tokens, chunk by chunk of the heads: while one is computed the next one's tokens are in flight.

    Args:
        compute: a chunk's attention of all tokens of this ring rank, by its number.
    """
    leaving = []
    q, k, v, opened = travelling(travel, q, k, v)
    arriving = exchanges[0].to_heads(q, k, v, opened)
    for chunk, exchange in enumerate(exchanges):
        operands = arriving()
        if chunk + 1 < len(exchanges):
            arriving = exchanges[chunk + 1].to_heads(q, k, v, opened)
        out = compute(chunk, *operands)
        leaving.append(exchange.to_tokens(travel.packed(out)))
    return travel.unpacked(joined([arrived() for arrived in leaving]), out.dtype)


def travelling(
    payload: Payload, q: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor, Tensor, Callable[[Tensor], Tensor]]:
    """Operands as they travel, and what makes operands of what has come."""
    if payload is EXACT:
        return q, k, v, lambda rows: rows
    dtype, heads = q.dtype, [x.shape[2] for x in (q, k, v)]
    q, k, v = payload.packed(torch.cat((q, k, v), dim=2)).split(heads, dim=2)
    return q, k, v, lambda rows: payload.unpacked(rows, dtype)


def around_the_ring(
    ring: Communicator,
    tokens: Sequence[int],
    attend: Attend,
    q: Tensor,
    kv: Tensor,
    payload: Payload = EXACT,
    prefix: Tensor | None = None,
) -> Tensor:
    """Attention of the local queries to the keys of all ring ranks. A collective.

    Args:
        tokens: how many keys each ring rank holds.
        q: `[batch, local queries, heads, head_dim]`.
        kv: `[2, batch, local keys, heads, head_dim]`, with the heads that `attend` takes.
        prefix: as kv, further keys and values that every rank has. They do not travel.
    """
    partial, kv = PartialAttention(q), payload.packed(kv)
    for hop in range(ring.size):
        source = (ring.rank - hop) % ring.size
        wait: Callable[[], Tensor] | None = None
        if hop + 1 < ring.size:  # the next block is in flight while this one is computed
            shape = (2, q.shape[0], tokens[(source - 1) % ring.size], *kv.shape[3:])
            wait = ring.shift(kv.reshape(-1), torch.Size(shape).numel())
        own = prefix if hop == 0 else None
        if q.numel() and (kv.numel() or own is not None):
            arrived = payload.unpacked(kv, q.dtype)
            k, v = arrived if own is None else torch.cat((own, arrived), dim=2)
            partial.add(*attend(q, k, v))
        if wait is not None:
            kv = wait().view(shape)
    return partial.result()


class PatchAttention:
    """One patch's tokens, which `split` describes, attend to the newest keys that the stage holds; theirs go there first."""

    def __init__(self, mesh: Mesh, split: SequenceSplit, patch: int, attend: Attend, payload: Payload = EXACT) -> None:
        self._ring = mesh.ring
        self._payload = payload
        self._to_heads = payload if mesh.ulysses.size > 1 else EXACT
        (runs,) = split.head_chunks(1)
        tokens = split.ulysses_tokens(mesh.ring.rank)
        self._exchange = HeadExchange(mesh.ulysses, tokens, split, runs, behind=False)
        self._tokens = split.ring_tokens()
        self._patch = patch
        self._kv_heads = runs[mesh.ulysses.rank].kv
        self._attend = repeated_heads(attend, split.group, runs[mesh.ulysses.rank])

    def __call__(
        self, block: Hashable, q: Tensor, k: Tensor, v: Tensor, cache: KVCache, prefix: Tensor | None = None
    ) -> Tensor:
        """Return the attention of the patch's local tokens; a `prefix`, as WholeAttention takes it, adds keys and values."""
        q, k, v, opened = travelling(self._to_heads, q, k, v)
        q, k, v = self._exchange.to_heads(q, k, v, opened)()
        first = None if prefix is None else prefix[:, :, :, self._kv_heads]
        out = self._over_the_ring(q, cache.update(block, self._patch, k, v), first)
        arrived = joined([self._exchange.to_tokens(self._to_heads.packed(out))()])
        return self._to_heads.unpacked(arrived, out.dtype)

    def _over_the_ring(self, q: Tensor, kv: Tensor, prefix: Tensor | None) -> Tensor:
        ring = self._ring
        if ring.size == 1:
            k, v = kv if prefix is None else torch.cat((prefix, kv), dim=2)
            return self._attend(q, k, v)[0] if q.numel() else q
        own = self._payload.packed(q)
        gathered = ring.gather(own.flatten(2), self._tokens).unflatten(2, own.shape[2:])
        everyone = self._payload.unpacked(gathered, q.dtype)
        out, lse = (
            torch.zeros_like(everyone),
            everyone.new_full((*everyone.shape[:3], 1), -torch.inf, dtype=torch.float32),
        )
        if everyone.numel() and kv.numel():
            out, lse = self._attend(everyone, kv[0], kv[1])
            lse = lse.transpose(1, 2).unsqueeze(-1)
        partial = PartialAttention(q)
        if prefix is not None and q.numel() and prefix.numel():
            partial.add(*self._attend(q, *prefix))
        returned = self._return(self._payload.packed(out))
        for part, part_lse in zip(returned, self._return(lse, "ring lse"), strict=True):
            partial.add(self._payload.unpacked(part, q.dtype), part_lse.squeeze(-1).transpose(1, 2))
        return partial.result()

    def _return(self, everyone: Tensor, kind: str = "") -> list[Tensor]:
        """Each ring rank's result for this rank's queries, from `[batch, all ranks' queries, heads, channels]`."""
        ring = self._ring
        batch, _, heads, channels = everyone.shape
        row, mine = batch * heads * channels, self._tokens[ring.rank]
        send = torch.cat([piece.reshape(-1) for piece in everyone.split(self._tokens, dim=1)])
        received = ring.all_to_all(send, [row * n for n in self._tokens], [row * mine] * ring.size, kind)
        return [piece.view(batch, mine, heads, channels) for piece in received.chunk(ring.size)] if mine else []


def replicated_queries(ranks: Communicator, attend: Attend, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention of queries that every rank has: to its own keys on each, merged by all in the order of ranks. A collective.

    Args:
        q: `[batch, queries, heads, head_dim]`, the same on all ranks.
        k, v: `[batch, this rank's keys, heads, head_dim]`; there may be none.

    Returns:
        As q, the same bits on all ranks.
    """
    if k.shape[1]:
        out, lse = attend(q, k, v)
        lse = lse.transpose(1, 2).unsqueeze(-1).float()
    else:
        out, lse = torch.zeros_like(q), q.new_full((*q.shape[:3], 1), -torch.inf, dtype=torch.float32)
    mine = torch.cat([out.float(), lse], dim=-1)
    everyone = ranks.gather(mine.flatten(2), [q.shape[1]] * ranks.size).unflatten(2, mine.shape[2:])
    partial = PartialAttention(q)
    for each in everyone.chunk(ranks.size, dim=1):
        partial.add(each[..., :-1], each[..., -1].transpose(1, 2))
    return partial.result()
