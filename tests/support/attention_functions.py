"""Functions in attention's place that look at where tokens are, as ComfyUI's nodes put them among a MODEL's options."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

Function = Callable[..., Tensor]

BLOCK = 3
"""Tokens of a block of the block-sparse one."""


def masked(allowed: Callable[[Tensor, Tensor, int], Tensor]) -> Function:
    """Attention where `allowed(query, key, head)` says so of positions `[queries, 1]` and `[1, keys]`; all see the first key."""

    def override(
        kernel: Any, q: Tensor, k: Tensor, v: Tensor, heads: int, mask: Tensor | None = None, **told: Any
    ) -> Tensor:
        if not told.get("skip_reshape"):
            q, k, v = (x.unflatten(2, (-1, q.shape[2] // heads)).transpose(1, 2) for x in (q, k, v))
        k, v = (x.repeat_interleave(heads // x.shape[1], dim=1) for x in (k, v))
        assert q.shape[1] == heads
        queries, keys = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])[None]
        seen = torch.stack([allowed(queries, keys, head) | (keys == 0) for head in range(heads)])[None]
        assert mask is None
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=told.get("scale"))
        return out if told.get("skip_output_reshape") else out.transpose(1, 2).flatten(2)

    return override


def causal(_: slice, __: int) -> Function:
    """Each token sees those before it."""
    return masked(lambda queries, keys, head: keys <= queries)


def block_sparse(_: slice, __: int) -> Function:
    """Each block of tokens sees itself and every third one."""
    return masked(lambda queries, keys, head: (queries // BLOCK - keys // BLOCK) % 3 == 0)


def windowed(widths: Sequence[int]) -> Callable[[slice, int], Function]:
    """Each token sees so many on either side, a number for each head."""

    def of_heads(run: slice, _: int) -> Function:
        own = widths[run]
        return masked(lambda queries, keys, head: (queries - keys).abs() <= own[head])

    return of_heads
