"""Looking at a forward: which modules are called, with what, and where attention is called.

While looking, attention is answered token by token, so that nothing in the network mixes tokens.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..models.comfyui.proof.ranks import in_a_line
from ..models.sequence_parallel.arguments import OPTIONS
from ..models.sequence_parallel.attentions import Operands
from ..models.sequence_parallel.compiled import OVERRIDE
from ..models.sequence_parallel.module_attention import NAME, answered
from .calls import FAILS, ModelCall
from .rules import Undescribed
from .values import by_name, called, mapped


@dataclass(frozen=True)
class Attention:
    """One call of attention: its operands, and its mask.

    `within` are the paths of the modules that were running, the outermost first; `attends_in` is the module of ComfyUI's that
    called it without transformer_options.
    """

    operands: Operands
    mask: Tensor | None
    within: tuple[str, ...]
    attends_in: str


@dataclass(frozen=True)
class ModuleCall:
    """One call of a module: `values` by name, as they were when it was called, its options, and what it returned."""

    path: str
    module: nn.Module
    values: Mapping[str, Any]
    options: Mapping[str, Any] | None
    returned: Any

    def again(self, change: Callable[[str, int, Tensor], Tensor], mixing: bool = False) -> tuple[Any, list[Attention]]:
        """What it gives for other tensors, and its calls of attention; `change` gets each one's argument and its number.

        With `mixing` a token gets of values that are not as many as there are tokens all that lie with it.

        Raises:
            Undescribed: it fails.
        """
        seen = ForwardTrace(mixing=mixing)
        values = {name: _changed(name, value, change) for name, value in self.values.items()}
        try:
            with self._answered(values, seen) as arguments:
                return called(self.module, arguments), seen.attentions
        except FAILS as error:
            raise Undescribed(f"{self.path} fails with other values ({in_a_line(error)})") from error

    @contextmanager
    def unseen(self) -> Iterator[Mapping[str, Any]]:
        """The same call's arguments, for calls of the module whose attention gives nothing, and is not written down."""
        values = {name: mapped(value, torch.clone) for name, value in self.values.items()}
        with self._answered(values, ForwardTrace(writing=False)) as arguments:
            yield arguments

    @contextmanager
    def _answered(self, values: Mapping[str, Any], seen: ForwardTrace) -> Iterator[Mapping[str, Any]]:
        options = {} if self.options is None else {OPTIONS: {**self.options, OVERRIDE: _AttentionRecorder(seen, "")}}
        with token_wise(seen):
            yield {**values, **options}


@dataclass
class ForwardTrace:
    """What was seen of one forward: `entered` are the modules, each below those that ran, in the order of their calls.

    `out` is what the model gave. For `mixing` see `ModuleCall.again`. Without `writing` attention gives zeros, and is not in it.
    """

    entered: list[tuple[str, ...]] = field(default_factory=list)
    attentions: list[Attention] = field(default_factory=list)
    runs: list[ModuleCall] = field(default_factory=list)
    within: list[str] = field(default_factory=list)
    out: Tensor = field(default_factory=lambda: torch.empty(0))
    mixing: bool = False
    writing: bool = True


@torch.inference_mode()
def trace(model: nn.Module, call: ModelCall, recorded: Sequence[str] = ()) -> ForwardTrace:
    """One forward. What the modules `recorded` are given is kept.

    Raises:
        Undescribed: it fails.
    """
    seen = ForwardTrace()
    with ExitStack() as stack:
        for path, module in model.named_modules():
            if path:
                stack.enter_context(_watched(seen, path, module, path in recorded))
        stack.enter_context(token_wise(seen))
        try:
            seen.out = call.of(model, {OVERRIDE: _AttentionRecorder(seen, "")})
        except FAILS as error:
            raise Undescribed(f"its forward fails on a small call ({in_a_line(error)})") from error
    return seen


@contextmanager
def token_wise(seen: ForwardTrace) -> Iterator[None]:
    """Have attention that is called without transformer_options answered token by token too."""
    with ExitStack() as stack:
        for name, module in list(sys.modules.items()):
            if name.startswith("comfy.ldm.") and callable(getattr(module, NAME, None)):
                stack.enter_context(answered(name, _AttentionRecorder(seen, name)))
        yield


@contextmanager
def _watched(seen: ForwardTrace, path: str, module: nn.Module, recorded: bool) -> Iterator[None]:
    """Write down each call of a module."""
    begun: list[tuple[dict[str, Any], Any]] = []

    def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
        seen.within.append(path)
        seen.entered.append(tuple(seen.within))
        if recorded:
            values = by_name(module, args, kwargs)
            options = values.pop(OPTIONS, None)
            begun.append((mapped(values, torch.clone), options))

    def leave(module: nn.Module, args: Any, kwargs: Any, returned: Any) -> None:
        seen.within.pop()
        if recorded:
            values, options = begun.pop()
            seen.runs.append(ModuleCall(path, module, values, options, mapped(returned, torch.clone)))

    handles = (
        module.register_forward_pre_hook(enter, with_kwargs=True),
        module.register_forward_hook(leave, with_kwargs=True),
    )
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class _AttentionRecorder:
    """Stands in for `optimized_attention`; see `Attentions`."""

    def __init__(self, seen: ForwardTrace, attends_in: str) -> None:
        self._seen = seen
        self._attends_in = attends_in

    def __call__(
        self,
        kernel: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        heads: int,
        mask: Tensor | None = None,
        attn_precision: Any = None,
        skip_reshape: bool = False,
        skip_output_reshape: bool = False,
        **extra_arguments: Any,
    ) -> Tensor:
        operands = Operands.of(q, k, v, heads, skip_reshape, extra_arguments)
        if self._seen.writing:
            copies = Operands(operands.q.clone(), operands.k.clone(), operands.v.clone())
            self._seen.attentions.append(Attention(copies, mask, tuple(self._seen.within), self._attends_in))
            out = _token_by_token(operands, self._seen.mixing)
        else:
            out = operands.v.new_zeros(*operands.q.shape[:3], operands.v.shape[3])
        return out if skip_output_reshape else out.transpose(1, 2).flatten(2)


def _changed(name: str, value: Any, change: Callable[[str, int, Tensor], Tensor]) -> Any:
    count = 0

    def next_one(tensor: Tensor) -> Tensor:
        nonlocal count
        count += 1
        return change(name, count - 1, tensor.clone())

    return mapped(value, next_one)


def _token_by_token(operands: Operands, mixing: bool) -> Tensor:
    """`[batch, heads, tokens, head_dim]`: of each token what follows from it alone; see `ModuleCall.again` for `mixing`."""
    q, v = operands.q, operands.v
    v = v.repeat_interleave(q.shape[1] // v.shape[1], dim=1)
    if q.shape[3] != v.shape[3]:
        q = q.mean(dim=3, keepdim=True).expand(*q.shape[:3], v.shape[3])
    if q.shape[2] == v.shape[2]:
        return q + v
    return q + v.mean(dim=2, keepdim=True) if mixing else q.contiguous()
