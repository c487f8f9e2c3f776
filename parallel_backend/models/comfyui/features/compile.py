"""Compilation of ComfyUI's blocks. An attention override in their options makes attention an operator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from ...sequence_parallel.arguments import OPTIONS
from ...sequence_parallel.compiled import OVERRIDE, CompiledEntry, attention


def _with_override(
    module: nn.Module, options: dict[str, Any], calls: list[None], args: Any, named: dict[str, Any]
) -> Any:
    """Run a block with an override in its options that calls the attention operator."""

    def override(
        kernel: Callable[..., Tensor],
        q: Tensor,
        k: Tensor,
        v: Tensor,
        heads: int,
        mask: Tensor | None = None,
        attn_precision: Any = None,
        skip_reshape: bool = False,
        skip_output_reshape: bool = False,
        enable_gqa: bool = False,
        low_precision_attention: bool = True,
        scale: float | None = None,
        transformer_options: Any = None,
        _inside_attn_wrapper: bool = True,
    ) -> Tensor:
        ordinal = len(calls)
        calls.append(None)
        return attention(
            q, k, v, mask, heads, f"{kernel.__module__}:{kernel.__name__}", ordinal, attn_precision, skip_reshape,
            skip_output_reshape, enable_gqa, low_precision_attention, scale,
        )  # fmt: skip

    return module.forward(*args, **named, **{OPTIONS: {**options, OVERRIDE: override}})


COMPILED = CompiledEntry(_with_override, OPTIONS)
"""The entry by which ComfyUI's blocks run with their attention as an operator."""
