"""All tokens of a stream and a share of its heads on each rank, for attention that looks at where tokens are."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..comm.communicator import Communicator
from ..layout import HeadRuns, SequenceSplit
from ..transfers import sent_to
from .exchange import HeadExchange, joined


class AllTokens:
    """From this rank's tokens and all heads to all tokens, in the model's order, and this rank's heads; and back.

    Args:
        ranks: they share tokens and heads, whether they are of Ulysses or of Ring.
        tokens: how many each of them holds.
        order: where the tokens of the model's order lie among those of the ranks, one rank's behind the other's.
        heads: how many there are.
        shares: the ranks' parts, as in the plan.

    Attributes:
        heads: those of this rank; none where there are fewer than ranks.
    """

    def __init__(
        self, ranks: Communicator, tokens: Sequence[int], order: Tensor, heads: int, shares: tuple[int, ...]
    ) -> None:
        split = SequenceSplit(tuple(tokens), heads, 1, ranks.size, shares)
        (runs,) = split.head_chunks(1)
        keys = [HeadRuns(slice(0, 0), own.kv) for own in runs]
        rows = [HeadRuns(own.q, slice(0, 0)) for own in runs]
        self._all = HeadExchange(ranks, tokens, split, runs, behind=False)
        self._keys = HeadExchange(ranks, tokens, split, keys, behind=False)
        self._rows = HeadExchange(ranks, tokens, split, rows, behind=False)
        self._order, self._back = order, order.argsort()
        self._moved = not torch.equal(order, torch.arange(order.numel()))
        self.heads = runs[ranks.rank].q

    def of_all(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        """`[batch, local tokens, heads, head_dim]` to `[batch, tokens, this rank's heads, head_dim]`. A collective."""
        return tuple(self._ordered(x) for x in self._all.to_heads(q, k, v, lambda rows: rows)())

    def of_keys(self, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        """The same of keys and values that no queries go with. A collective."""
        _, *kv = self._keys.to_heads(k[:, :, :0], k, v, lambda rows: rows)()
        return tuple(self._ordered(x) for x in kv)

    def of_rows(self, x: Tensor) -> Tensor:
        """`[batch, local tokens, heads, row]` to `[batch, tokens, this rank's heads, row]`, whatever the row. A collective."""
        nothing = x[:, :, :0]
        rows, *_ = self._rows.to_heads(x, nothing, nothing, lambda rows: rows)()
        return self._ordered(rows)

    def back(self, out: Tensor) -> Tensor:
        """`[batch, tokens, this rank's heads, head_dim]` to `[batch, local tokens, heads, head_dim]`. A collective."""
        if self._moved:
            out = out.index_select(1, self._back)
        return joined([self._all.to_tokens(out)()])

    def _ordered(self, x: Tensor) -> Tensor:
        if not self._moved:
            return x
        self._order, self._back = (sent_to(index, x.device) for index in (self._order, self._back))
        return x.index_select(1, self._order)
