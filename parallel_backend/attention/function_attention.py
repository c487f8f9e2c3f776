"""Attention by a function that reads where tokens are: it receives all tokens in the model's order, and some of the heads."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..comm.communicator import Communicator
from ..layout import SequenceSplit
from ..mesh import Mesh
from ..transfers import to_device
from .codec import EXACT, Codec
from .sequence_parallel import ulysses_attention
from .ulysses import (
    HeadExchange,
    UlyssesLayout,
    concatenate_heads,
    repeat_kv_heads,
    unchanged,
    without_keys,
    without_queries,
)

HeadFunction = Callable[[slice, Tensor, Tensor, Tensor], Tensor]
"""(heads, q, k, v) to attention of q's shape; the operands are these heads' `[batch, all tokens, heads, head_dim]`."""


class TokenOrder:
    """A permutation between the order in which an all-to-all delivers tokens, rank by rank, and the model's order.

    Args:
        order: for each token in the model's order, its position among the delivered tokens (int64).
    """

    def __init__(self, order: Tensor) -> None:
        self._to_model, self._to_ranks = order, order.argsort()
        self._is_identity = torch.equal(order, torch.arange(order.numel()))

    def to_model(self, x: Tensor) -> Tensor:
        """Permute `[batch, delivered tokens, …]` into the model's order."""
        if self._is_identity:
            return x
        self._to_model, self._to_ranks = (to_device(index, x.device) for index in (self._to_model, self._to_ranks))
        return x.index_select(1, self._to_model)

    def to_ranks(self, x: Tensor) -> Tensor:
        """Permute `[batch, tokens in the model's order, …]` back, on the device of an earlier `to_model`."""
        return x if self._is_identity else x.index_select(1, self._to_ranks)


class FunctionAttention:
    """Ulysses attention whose kernel is a function of a node. Ring is not possible.

    Args:
        mesh: the rank's communicators.
        split: the tokens of each rank and the numbers of heads.
        order: as in `TokenOrder`.
        replicated_keys: every rank has all keys and values, so only queries are exchanged.
        max_chunks: as in `UlyssesLayout`.
        codec: as in `UlyssesLayout`.
    """

    def __init__(
        self,
        mesh: Mesh,
        split: SequenceSplit,
        order: Tensor,
        replicated_keys: bool,
        max_chunks: int = 1,
        codec: Codec = EXACT,
    ) -> None:
        assert mesh.ring.size == 1
        tokens = split.ulysses_tokens(0)
        self._layout = UlyssesLayout(mesh.ulysses, tokens, split, max_chunks, codec, exchange_keys=not replicated_keys)
        self._replicated_keys = replicated_keys
        self._group = split.group_size
        self._order = TokenOrder(order)

    def __call__(self, function: HeadFunction, q: Tensor, k: Tensor, v: Tensor, prefix: Tensor | None = None) -> Tensor:
        """Compute attention of the local tokens. A collective.

        Args:
            function: computes attention for some heads.
            q: `[batch, local tokens, heads, head_dim]`.
            k: `[batch, local tokens, key heads, head_dim]`; all tokens if keys are replicated.
            v: as k.
            prefix: keys and values that precede those of all ranks, as in `usp_attention`.

        Returns:
            Attention output of the local tokens, shape and dtype of q.
        """
        replicated_kv = k, v

        def attend_chunk(chunk: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            if not q.numel():
                return q
            heads = self._layout.heads[chunk]
            q = self._order.to_model(q)
            if self._replicated_keys:
                k, v = (x[:, :, heads.kv] for x in replicated_kv)
            else:
                k, v = map(self._order.to_model, (k, v))
            if prefix is not None:
                k, v = (torch.cat(pair, dim=1) for pair in zip(prefix[:, :, :, heads.kv], (k, v), strict=True))
            attend = repeat_kv_heads(lambda q, k, v: function(heads.q, q, k, v), self._group, heads)
            return self._order.to_ranks(attend(q, k, v))

        if self._replicated_keys:
            k = v = q[:, :, :0]
        return ulysses_attention(q, k, v, self._layout, attend_chunk)


class OrderedHeadExchange:
    """The all-to-alls between local tokens of all heads and all tokens, in the model's order, of this rank's heads.

    Args:
        ranks: the ranks that share tokens and heads, Ulysses and Ring ranks alike.
        tokens: the number of tokens on each of them.
        order: as in `TokenOrder`.
        heads: the number of heads.
        shares: the ranks' shares of the work, as in the plan.

    Attributes:
        heads: the heads of this rank; none if there are fewer heads than ranks.
    """

    def __init__(
        self, ranks: Communicator, tokens: Sequence[int], order: Tensor, heads: int, shares: tuple[int, ...]
    ) -> None:
        split = SequenceSplit(tuple(tokens), heads, 1, ranks.size, shares)
        (chunk,) = split.head_chunks(1)
        self._exchange = HeadExchange(ranks, tokens, split, chunk, overlap=False)
        self._key_exchange = HeadExchange(ranks, tokens, split, without_queries(chunk), overlap=False)
        self._query_exchange = HeadExchange(ranks, tokens, split, without_keys(chunk), overlap=False)
        self._order = TokenOrder(order)
        self.heads = chunk[ranks.rank].q

    def qkv_to_heads(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        """Exchange q, k and v. A collective.

        Args:
            q: `[batch, local tokens, heads, head_dim]`.
            k: as q.
            v: as q.

        Returns:
            q, k and v, `[batch, tokens, this rank's heads, head_dim]`.
        """
        return tuple(map(self._order.to_model, self._exchange.start_to_heads(q, k, v, unchanged)()))

    def kv_to_heads(self, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        """Exchange keys and values without queries, as `qkv_to_heads` does. A collective."""
        _, *kv = self._key_exchange.start_to_heads(k[:, :, :0], k, v, unchanged)()
        return tuple(map(self._order.to_model, kv))

    def rows_to_heads(self, x: Tensor) -> Tensor:
        """Exchange one tensor, `[batch, local tokens, heads, n]` to `[batch, tokens, this rank's heads, n]`. A collective."""
        empty = x[:, :, :0]
        rows, *_ = self._query_exchange.start_to_heads(x, empty, empty, unchanged)()
        return self._order.to_model(rows)

    def to_tokens(self, out: Tensor) -> Tensor:
        """Return outputs to the tokens' ranks. A collective.

        Args:
            out: `[batch, tokens, this rank's heads, head_dim]`.

        Returns:
            `[batch, local tokens, heads, head_dim]`.
        """
        return concatenate_heads([self._exchange.start_to_tokens(self._order.to_ranks(out))()])
