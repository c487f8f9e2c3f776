"""Traces a forward: the modules that it calls, their input, and its attention calls.

While a trace runs, attention is computed token by token, so that nothing in the network mixes tokens.
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
    """One attention call.

    Attributes:
        operands: q, k and v.
        mask: the mask, if any.
        within: the paths of the running modules, the outermost first.
        attends_in: the ComfyUI module that made the call without transformer_options; empty for a call with these options.
    """

    operands: Operands
    mask: Tensor | None
    within: tuple[str, ...]
    attends_in: str


@dataclass(frozen=True)
class ModuleCall:
    """One call of a module: copies of its arguments by name, its transformer_options, and a copy of its output."""

    path: str
    module: nn.Module
    values: Mapping[str, Any]
    options: Mapping[str, Any] | None
    returned: Any

    def again(self, change: Callable[[str, int, Tensor], Tensor], mixing: bool = False) -> tuple[Any, list[Attention]]:
        """Return the module's output for changed tensors, and its attention calls.

        Args:
            change: gets an argument's name, the number of a tensor in the argument, and a copy of the tensor; returns a new
                tensor.
            mixing: if keys and tokens differ in number, add the mean of all values to each token.

        Raises:
            Undescribed: the module fails.
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
        """Provide the call's arguments for another call of the module, whose attention returns zeros and is not recorded."""
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
    """The record of one forward.

    Attributes:
        entered: for each module call, in order, the paths of the running modules.
        attentions: the attention calls.
        runs: the calls of recorded modules.
        within: the paths of the modules that run now.
        out: the model's output.
        mixing: as in `ModuleCall.again`.
        writing: False to record no attention and let attention return zeros.
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
    """Run one forward and return its trace, with the arguments and outputs of the modules `recorded`.

    Raises:
        Undescribed: the forward fails.
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
            raise Undescribed(f"its forward fails on a test call ({in_a_line(error)})") from error
    return seen


@contextmanager
def token_wise(seen: ForwardTrace) -> Iterator[None]:
    """Replace attention that ComfyUI's modules call without transformer_options by token-by-token attention too."""
    with ExitStack() as stack:
        for name, module in list(sys.modules.items()):
            if name.startswith("comfy.ldm.") and callable(getattr(module, NAME, None)):
                stack.enter_context(answered(name, _AttentionRecorder(seen, name)))
        yield


@contextmanager
def _watched(seen: ForwardTrace, path: str, module: nn.Module, recorded: bool) -> Iterator[None]:
    """Record each call of a module."""
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
    """A replacement of `optimized_attention` that records the call and keeps tokens separate; see `Attention`."""

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
    """Return `[batch, heads, tokens, head_dim]`, each token from its own q and v; see `ModuleCall.again` for `mixing`."""
    q, v = operands.q, operands.v
    v = v.repeat_interleave(q.shape[1] // v.shape[1], dim=1)
    if q.shape[3] != v.shape[3]:
        q = q.mean(dim=3, keepdim=True).expand(*q.shape[:3], v.shape[3])
    if q.shape[2] == v.shape[2]:
        return q + v
    return q + v.mean(dim=2, keepdim=True) if mixing else q.contiguous()
