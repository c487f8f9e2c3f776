"""Replacement of the scaled dot product in diffusers' attention processors by distributed attention."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from ...errors import Refused
from ..sequence_parallel.attentions import Attentions
from ..sequence_parallel.compiled import CompiledEntry, attention

Answer = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]
"""A function that replaces a scaled dot product, given q, k, v and the mask."""


def answer_attention(module: nn.Module, running: Callable[[], Attentions]) -> None:
    """Make the running forward compute every attention of a diffusers model.

    The attention processors stay as diffusers made them. Only `scaled_dot_product_attention` inside them is replaced, so
    everything else that a version of diffusers computes there still runs. If a processor uses another attention, the block that
    declares the attention misses the call.

    Args:
        running: returns the attentions of the running forward.
    """
    subclasses: dict[type, type] = {}
    for child in module.modules():
        processor = getattr(child, "processor", None)
        if processor is not None and type(processor) not in subclasses.values():
            kind = type(processor)
            if kind not in subclasses:
                subclasses[kind] = _answered(kind, running)
            processor.__class__ = subclasses[kind]


def _answered(kind: type, running: Callable[[], Attentions]) -> type:
    @functools.wraps(kind.__call__)  # diffusers passes only the arguments that the signature names
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return kind.__call__(self, *args, **kwargs)
        attentions = running()

        def answer(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
            return attentions(None, q, k, v, q.shape[1], mask=mask, skip_reshape=True, skip_output_reshape=True)

        with _Answered(answer):
            return kind.__call__(self, *args, **kwargs)

    return type(kind.__name__, (kind,), {"__call__": call, "__module__": kind.__module__})


class _Answered(TorchFunctionMode):
    """A function mode that replaces torch's scaled dot product. Tensors are `[batch, heads, tokens, head_dim]`."""

    def __init__(self, answer: Answer) -> None:
        super().__init__()
        self._answer = answer

    def __torch_function__(self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        """Replace torch's scaled dot product, and call every other function unchanged."""
        if func is not F.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        return self._attend(*args, **(kwargs or {}))

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, **keywords: Any
    ) -> Tensor:
        if unknown := sorted(name for name, value in keywords.items() if value):
            raise Refused(
                f"diffusers' attention was given {', '.join(unknown)}, which this pack does not support: update the "
                "pack, or install an older diffusers."
            )
        return self._answer(query, key, value, attn_mask)


def _run_answered(module: nn.Module, _: None, calls: list[None], args: Any, named: dict[str, Any]) -> Any:
    """Run a block in which torch's scaled dot product calls the attention operator."""

    def answer(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        ordinal = len(calls)
        calls.append(None)
        return attention(q, k, v, mask, q.shape[1], "", ordinal, None, True, True, False, True, None)

    with _Answered(answer):
        return module.forward(*args, **named)


ENTRY = CompiledEntry(_run_answered, options="")
"""The entry by which compiled blocks of diffusers call the attention operator."""
