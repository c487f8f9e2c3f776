"""OnlineSoftmax: merges attention to several blocks of keys by log-sum-exp, as FlashAttention does (arXiv 2205.14135)."""

from __future__ import annotations

import torch
from torch import Tensor


class OnlineSoftmax:
    """The attention output of one set of queries over the blocks of keys that were added so far.

    Args:
        q: the queries `[batch, queries, heads, head_dim]`; there may be none.
    """

    def __init__(self, q: Tensor) -> None:
        self._q = q
        self._out: Tensor | None = None
        self._lse = torch.empty(0)

    def add(self, out: Tensor, lse: Tensor) -> None:
        """Merge the attention to one block of keys, in fp32.

        Args:
            out: `[batch, queries, heads, head_dim]`.
            lse: log-sum-exp of the scores `[batch, heads, queries]`; -inf for a block without keys.
        """
        lse = lse.transpose(1, 2).unsqueeze(-1).float()
        if self._out is None:
            self._out, self._lse = out, lse
            return
        weight = torch.sigmoid(lse - self._lse).nan_to_num(0.0)  # NaN if neither side has keys
        self._out = self._out.float().lerp(out.float(), weight)
        self._lse = torch.logaddexp(self._lse, lse)

    def result(self) -> Tensor:
        """Return the output over all blocks in the queries' dtype; the queries themselves if no block was added."""
        return self._q if self._out is None else self._out.to(self._q.dtype)
