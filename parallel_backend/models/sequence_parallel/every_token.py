"""Attention of a rank's tokens by a function that receives all tokens of some heads, because it depends on token positions."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ...attention.codec import EXACT, Codec
from ...attention.function_attention import FunctionAttention, HeadFunction
from ...comm.communicator import Communicator
from ...layout import SequenceSplit
from .attentions import with_idle, without_idle
from .call_layout import CallLayout
from .placement import Placement, order_of


class EveryToken:
    """The exchange between the local tokens of some streams and all tokens, in the model's order, of some heads.

    Args:
        ranks: the ranks that share tokens and heads.
        placements: the streams, one after the other.
        heads: the number of heads.
        kv_heads: the number of key heads; 0 for `heads`.
        replicated_keys: every rank has all keys and values.
        max_chunks: as in `FunctionAttention`.
        codec: as in `FunctionAttention`.
    """

    def __init__(
        self, call: CallLayout, ranks: Communicator, placements: Sequence[Placement], heads: int, kv_heads: int = 0,
        replicated_keys: bool = False, max_chunks: int = 1, codec: Codec = EXACT,
    ) -> None:  # fmt: skip
        self._counts = [placement.counts[call.rank] for placement in placements]
        self._replicated_keys = replicated_keys

        def make() -> FunctionAttention:
            tokens = tuple(map(sum, zip(*(placement.counts for placement in placements), strict=True)))
            split = SequenceSplit(tokens, heads, 1, ranks.size, call.layout.shares, kv_heads or heads)
            return FunctionAttention(ranks, split, order_of(placements), replicated_keys, max_chunks, codec)

        key = "every token", heads, kv_heads, replicated_keys, max_chunks, codec, *placements
        self._attention = call.layout.once(key, make)

    def attend(self, function: HeadFunction, q: Tensor, k: Tensor, v: Tensor, prefix: Tensor | None = None) -> Tensor:
        """Return the function's results for this rank's tokens. A collective.

        The arguments are those of `FunctionAttention`. A stream without tokens on this rank may have an idle one.
        """
        padded = self._padded(q)
        keys = (k, v) if self._replicated_keys else (self._own(k), self._own(v))
        return with_idle(self._attention(function, self._own(q), *keys, prefix), padded, self._counts)

    def keys(self, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        """Return all keys and values of this rank's heads, `[batch, tokens, heads, head_dim]`. A collective."""
        return self._attention.keys_to_heads(self._own(k), self._own(v))

    def _own(self, x: Tensor) -> Tensor:
        """Return `[batch, tokens, heads, channels]` without idle tokens."""
        return without_idle(x.transpose(1, 2), self._padded(x), self._counts).transpose(1, 2)

    def _padded(self, x: Tensor) -> list[int]:
        return self._counts if x.shape[1] == sum(self._counts) else [max(1, count) for count in self._counts]
