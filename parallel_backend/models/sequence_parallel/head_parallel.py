"""Attention that depends on token positions: functions and a submodule's own method run on all tokens of some heads."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from ...attention.codec import EXACT, Codec
from ...attention.function_attention import FunctionAttention, HeadFunction
from ...comm.communicator import Communicator
from ...declaration import HeadParallelAttention
from ...errors import Refused
from ...layout import SequenceSplit, length
from .arguments import OPTIONS
from .attentions import with_idle, without_idle
from .call_layout import CallLayout
from .compiled import OVERRIDE
from .forward import RankForward
from .placement import Placement, order_of


class EveryToken:
    """The exchange from local tokens of all heads to all tokens of some heads, in the model's order, and back.

    Args:
        call: the layout of the model call.
        ranks: the ranks that divide tokens and heads.
        placements: the placements of the streams, in the order in which the model concatenates them.
        heads: the number of heads.
        kv_heads: the number of key heads; 0 if it is `heads`.
        replicated_keys: every rank has all keys and values.
        max_chunks: as in `FunctionAttention`.
        codec: as in `FunctionAttention`.
    """

    def __init__(
        self, call: CallLayout, ranks: Communicator, placements: Sequence[Placement], heads: int, kv_heads: int = 0,
        replicated_keys: bool = False, max_chunks: int = 1, codec: Codec = EXACT,
    ) -> None:  # fmt: skip
        self._counts = [placement.counts[call.rank] for placement in placements]
        self._replicated_keys = replicated_keys

        def make() -> FunctionAttention:
            tokens = tuple(map(sum, zip(*(placement.counts for placement in placements), strict=True)))
            split = SequenceSplit(tokens, heads, 1, ranks.size, call.layout.shares, kv_heads or heads)
            return FunctionAttention(ranks, split, order_of(placements), replicated_keys, max_chunks, codec)

        key = "every token", ranks, heads, kv_heads, replicated_keys, max_chunks, codec, *placements
        self._attention = call.layout.once(key, make)

    def attend(self, function: HeadFunction, q: Tensor, k: Tensor, v: Tensor, prefix: Tensor | None = None) -> Tensor:
        """Return the function's results for this rank's tokens. A collective.

        The arguments are those of `FunctionAttention`. A stream without tokens on this rank may have an idle token.
        """
        padded = self._padded(q)
        keys = (k, v) if self._replicated_keys else (self._own(k), self._own(v))
        return with_idle(self._attention(function, self._own(q), *keys, prefix), padded, self._counts)

    def keys(self, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        """Return the keys and values of all tokens for this rank's heads, `[batch, tokens, heads, head_dim]`. A collective."""
        return self._attention.keys_to_heads(self._own(k), self._own(v))

    def _own(self, x: Tensor) -> Tensor:
        """Return `[batch, tokens, heads, channels]` without idle tokens."""
        return without_idle(x.transpose(1, 2), self._padded(x), self._counts).transpose(1, 2)

    def _padded(self, x: Tensor) -> list[int]:
        return self._counts if x.shape[1] == sum(self._counts) else [max(1, count) for count in self._counts]


class HeadParallelMethod:
    """The callable that replaces the method `attention.method` of a submodule.

    Args:
        inside: the submodule.
        now: returns the running forward.

    Raises:
        Refused: the submodule lacks a declared attribute.
    """

    def __init__(self, inside: nn.Module, attention: HeadParallelAttention, now: Callable[[], RankForward]) -> None:
        self._inside = inside
        self._attention = attention
        self._now = now
        for name in (attention.method, attention.projection, attention.output_layer, "num_heads"):
            if not hasattr(inside, name):
                raise Refused(
                    f"the model's {type(inside).__name__} has no {name}: this ComfyUI is newer or older than this pack knows; "
                    "update the pack, or use Load Diffusion Model."
                )
        self._signature = inspect.signature(getattr(inside, attention.method))
        self._projected = inspect.signature(getattr(inside, attention.projection)).parameters

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the method's result for this rank's tokens. A collective."""
        now, declared, inside = self._now(), self._attention, self._inside
        block = now.attentions.block
        assert block is not None
        if block.next() is not declared:
            raise Refused(
                f"the model's {block.name} calls {declared.method} and this pack expects another call of attention: "
                "update the pack, or use Load Diffusion Model."
            )
        bound = self._signature.bind(*args, **kwargs)
        bound.apply_defaults()
        values: dict[str, Any] = bound.arguments
        q, k, v = getattr(inside, declared.projection)(**{name: values[name] for name in self._projected})
        heads, width = q.shape[2:]
        placement = block.placements[declared.stream]
        keys = {name: block.placements[name] for name in declared.keys if values[name] is not None}
        if keys:  # all keys are of one stream
            (where,) = {id(each): each for each in keys.values()}.values()
            further = EveryToken(now.call, now.mesh.sequence, [where], heads)
            values |= zip(keys, further.keys(*(values[name] for name in keys)), strict=True)

        def attend(run: slice, *operands: Tensor) -> Tensor:
            own = length(run)
            first = next(iter(self._signature.parameters))
            tokens = operands[0].shape[:2]
            local = values | {
                first: q.new_empty(()).expand(*tokens, heads * width),  # only its shape is read
                OPTIONS: _with_attention(values[OPTIONS], now, run, heads),
            }
            if declared.scratch:
                local[declared.scratch] = tree_map_only(
                    Tensor, lambda tensor: _narrower(tensor, own, heads), values[declared.scratch]
                )
            computed: Tensor = getattr(self._of(operands, own), declared.method)(**local)
            return computed.unflatten(2, (own, width))

        out = EveryToken(now.call, now.mesh.sequence, [placement], heads).attend(attend, q, k, v)
        result: Tensor = getattr(inside, declared.output_layer)(out.flatten(2))
        return result

    def _of(self, operands: tuple[Tensor, ...], heads: int) -> nn.Module:
        """Return a copy of the submodule that has only these heads, and whose projection returns the operands."""
        shallow = copy.copy(self._inside)
        shallow._modules = {**self._inside._modules, self._attention.output_layer: nn.Identity()}
        vars(shallow).update({"num_heads": heads, self._attention.projection: lambda *_, **__: operands})
        return shallow


def _narrower(tensor: Tensor, own: int, heads: int) -> Tensor:
    """Return the part of scratch memory that `own` of `heads` heads need."""
    shape = list(tensor.shape)
    shape[2] = shape[2] // heads * own
    needed = tensor.numel() // heads * own
    return tensor.view(-1)[:needed].view(shape)


def _with_attention(options: Mapping[str, Any], now: RankForward, run: slice, heads: int) -> dict[str, Any]:
    """Return the options with the function that computes attention for all tokens and some of the heads."""
    answer = now.attentions.of_heads(run, heads)
    other_options = {name: value for name, value in options.items() if name != OVERRIDE}
    return other_options if answer is None else {**other_options, OVERRIDE: answer}
