"""The way into a submodule whose attention goes by where tokens are: its own method runs for all tokens and some of its heads."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from ...declaration import HeadParallelAttention
from ...errors import Refused
from .arguments import OPTIONS
from .compiled import OVERRIDE
from .every_token import all_tokens, back_here, here
from .forward import RankForward


class OfSomeHeads:
    """Stands in for `attention.method` of a submodule.

    Args:
        now: the forward that is running.

    Raises:
        Refused: the submodule has not what is declared.
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
        """What the method gives, for this rank's tokens. A collective."""
        now, declared, inside = self._now(), self._attention, self._inside
        block = now.attentions.block
        assert block is not None
        if block.next() is not declared:
            raise Refused(
                f"the model's {block.name} calls {declared.method} where this pack knows of another attention: update the pack, "
                "or use Load Diffusion Model."
            )
        bound = self._signature.bind(*args, **kwargs)
        bound.apply_defaults()
        values: dict[str, Any] = bound.arguments
        q, k, v = getattr(inside, declared.projection)(**{name: values[name] for name in self._projected})
        batch, _, heads, width = q.shape
        placement = block.placements[declared.stream]
        exchange = all_tokens(now, placement, heads)
        operands = exchange.qkv_to_heads(*(here(x, placement, now) for x in (q, k, v)))
        keys = {name: block.placements[name] for name in declared.keys if values[name] is not None}
        if keys:  # of one stream
            (where,) = {id(each): each for each in keys.values()}.values()
            further = all_tokens(now, where, heads).kv_to_heads(*(here(values[name], where, now) for name in keys))
            values |= zip(keys, further, strict=True)
        own = exchange.heads.stop - exchange.heads.start
        out = q.new_empty(batch, placement.length, 0, width)
        if own:
            first = next(iter(self._signature.parameters))
            values[first] = q.new_empty(()).expand(batch, placement.length, heads * width)  # for its shape
            values[OPTIONS] = _answered(values[OPTIONS], now, exchange.heads, heads)
            if declared.scratch:
                values[declared.scratch] = tree_map_only(
                    Tensor, lambda tensor: _narrower(tensor, own, heads), values[declared.scratch]
                )
            computed = getattr(self._of(operands, own), declared.method)(**values)
            out = computed.unflatten(2, (own, width))
        result: Tensor = getattr(inside, declared.output_layer)(
            back_here(exchange.to_tokens(out), placement, now).flatten(2)
        )
        return result

    def _of(self, operands: tuple[Tensor, ...], heads: int) -> nn.Module:
        """The submodule as if it had these heads alone; what it projects is there."""
        shallow = copy.copy(self._inside)
        shallow._modules = {**self._inside._modules, self._attention.output_layer: nn.Identity()}
        vars(shallow).update({"num_heads": heads, self._attention.projection: lambda *_, **__: operands})
        return shallow


def _narrower(tensor: Tensor, own: int, heads: int) -> Tensor:
    """Of scratch memory as much as some of the heads need."""
    shape = list(tensor.shape)
    shape[2] = shape[2] // heads * own
    needed = tensor.numel() // heads * own
    return tensor.view(-1)[:needed].view(shape)


def _answered(options: Mapping[str, Any], now: RankForward, run: slice, heads: int) -> dict[str, Any]:
    """The options with what answers for some heads and all tokens."""
    answer = now.attentions.of_heads(run, heads)
    other_options = {name: value for name, value in options.items() if name != OVERRIDE}
    return other_options if answer is None else {**other_options, OVERRIDE: answer}
