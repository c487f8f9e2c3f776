"""Attention functions that depend on token positions, as ComfyUI's nodes put them into a MODEL's options."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

Function = Callable[..., Tensor]


def masked(allowed: Callable[[Tensor, Tensor, int], Tensor]) -> Function:
    """Return an attention function with a mask. Every query also attends to the first key.

    Args:
        allowed: called as `allowed(query, key, head)` with positions `[queries, 1]` and `[1, keys]`; true where the query
            attends.
    """

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


def windowed(widths: Sequence[int]) -> Callable[[slice, int], Function]:
    """Return a maker of attention in which each token attends to `widths[head]` tokens on either side.

    `widths` has all heads of the model; the maker takes the slice of the heads that a rank computes.
    """

    def of_heads(run: slice, _: int) -> Function:
        own = widths[run]
        return masked(lambda queries, keys, head: (queries - keys).abs() <= own[head])

    return of_heads
