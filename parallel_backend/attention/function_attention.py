"""Attention by a function that depends on token positions: it receives all tokens in the model's order, and some heads."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..comm.communicator import Communicator
from ..layout import SequenceSplit
from ..transfers import to_device
from .codec import EXACT, Codec
from .sequence_parallel import ulysses_attention
from .ulysses import HeadExchange, UlyssesLayout, repeat_kv_heads, unchanged, without_queries

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
    """Attention by a function in place of a kernel.

    One all-to-all gives each rank all tokens of some heads. Another all-to-all returns the outputs.

    Args:
        ranks: the ranks that share tokens and heads.
        split: the tokens of each rank, and the numbers of heads, without Ring.
        order: as in `TokenOrder`.
        replicated_keys: every rank has all keys and values, so only queries are exchanged.
        max_chunks: as in `UlyssesLayout`.
        codec: as in `UlyssesLayout`.
    """

    def __init__(
        self,
        ranks: Communicator,
        split: SequenceSplit,
        order: Tensor,
        replicated_keys: bool = False,
        max_chunks: int = 1,
        codec: Codec = EXACT,
    ) -> None:
        assert split.ring == 1
        tokens = split.ulysses_tokens(0)
        self._layout = UlyssesLayout(ranks, tokens, split, max_chunks, codec, exchange_keys=not replicated_keys)
        self._key_exchange = HeadExchange(ranks, tokens, split, without_queries(split.head_chunks(1)[0]), overlap=False)
        self._replicated_keys = replicated_keys
        self._group = split.group_size
        self._order = TokenOrder(order)

    def __call__(self, function: HeadFunction, q: Tensor, k: Tensor, v: Tensor, prefix: Tensor | None = None) -> Tensor:
        """Compute attention of the local tokens. A collective.

        Args:
            function: computes attention for some heads. A rank without heads does not call it.
            q: `[batch, local tokens, heads, channels]`.
            k: `[batch, local tokens, key heads, channels]`; all tokens if keys are replicated.
            v: as k, `[…, head_dim]`.
            prefix: keys and values that precede those of all ranks, as in `usp_attention`.

        Returns:
            The function's results for the local tokens, `[batch, local tokens, heads, head_dim]`.
        """
        replicated_kv = k, v

        def attend_chunk(chunk: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            if not q.numel():
                return q.new_empty(*q.shape[:3], replicated_kv[1].shape[3])
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

    def keys_to_heads(self, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        """Return all keys and values of this rank's heads, `[batch, tokens, heads, head_dim]`. A collective.

        Args:
            k: `[batch, local tokens, key heads, head_dim]`.
            v: as k.
        """
        _, *kv = self._key_exchange.start_to_heads(k[:, :, :0], k, v, unchanged)()
        return tuple(map(self._order.to_model, kv))
