"""diffusers' attention processors, whose scaled dot product the mechanism answers."""

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
"""Stands in for a scaled dot product: given q, k, v and the mask."""


def answer_attention(module: nn.Module, running: Callable[[], Attentions]) -> None:
    """Have every attention of a model of diffusers' ask the running forward.

    Its processor stays what diffusers made it, and only `scaled_dot_product_attention` is answered inside: whatever else a
    version of diffusers computes there is computed, and an attention of another kind is missed by the block that declares it.
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
    @functools.wraps(kind.__call__)  # diffusers passes on what the signature names, and nothing else
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
    """Inside, torch's scaled dot products are answered, `[batch, heads, tokens, head_dim]`."""

    def __init__(self, answer: Answer) -> None:
        super().__init__()
        self._answer = answer

    def __torch_function__(self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        """Answer torch's scaled dot product; every other function is computed as it is."""
        if func is not F.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        return self._attend(*args, **(kwargs or {}))

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, **keywords: Any
    ) -> Tensor:
        if unknown := sorted(name for name, value in keywords.items() if value):
            raise Refused(
                f"diffusers' attention is given {', '.join(unknown)}, which this pack does not know: update the pack, or install "
                "an older diffusers."
            )
        return self._answer(query, key, value, attn_mask)


def _run_answered(module: nn.Module, _: None, calls: list[None], args: Any, named: dict[str, Any]) -> Any:
    """With torch's scaled dot products answered in the block."""

    def answer(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        ordinal = len(calls)
        calls.append(None)
        return attention(q, k, v, mask, q.shape[1], "", ordinal, None, True, True, False, True, None)

    with _Answered(answer):
        return module.forward(*args, **named)


ENTRY = CompiledEntry(_run_answered, options="")
"""How diffusers' blocks come to call the operator of attention when they are compiled."""
