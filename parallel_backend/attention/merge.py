"""Merging partial attention results over blocks of keys by their log-sum-exp, in fp32.

Source: the online softmax of FlashAttention (arXiv 2205.14135) as Ring Attention uses it (arXiv 2310.01889).
"""

from __future__ import annotations

import torch
from torch import Tensor


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
