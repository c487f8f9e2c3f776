"""Merging partial attention results over blocks of keys by their log-sum-exp, in fp32.

Source: the online softmax of FlashAttention (arXiv 2205.14135) as Ring Attention uses it (arXiv 2310.01889).
"""

from __future__ import annotations

import torch
from torch import Tensor


class PartialAttention:
    """The running result of one set of queries over the key blocks seen so far."""

    def __init__(self) -> None:
        self._out: Tensor | None = None
        self._lse: Tensor | None = None
        self._dtype: torch.dtype | None = None

    def add(self, out: Tensor, lse: Tensor) -> None:
        """Merge one block: out `[batch, queries, heads, head_dim]`, LSE `[batch, heads, queries]`."""
        lse = lse.transpose(1, 2).unsqueeze(-1).float()
        if self._out is None or self._lse is None:
            self._out, self._lse, self._dtype = out, lse, out.dtype
            return
        total = torch.logaddexp(self._lse, lse)
        self._out = self._out.float() * (self._lse - total).exp() + out.float() * (lse - total).exp()
        self._lse = total

    def result(self) -> Tensor:
        """The attention output over all blocks, in the dtype of the first one."""
        assert self._out is not None, "no block was added"
        return self._out.to(self._dtype)
