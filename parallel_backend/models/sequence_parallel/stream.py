"""Stream: tokens that have the shape of the whole and lie on all sequence ranks.

What a model does between its blocks is then right by construction. Joining and slicing along tokens and element-wise
operations stay local (a slice is a view, so what is added to it in place arrives), except that what lies on other ranks is moved
to where the first operand's tokens are; any other operation first gathers the whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from ...distributed_tensor import DispatchRules, DistributedTensor, of_parts
from .placement import Placement
from .token_layout import TokenLayout

aten = torch.ops.aten

LEFT, HERE, RIGHT = -1, 0, 1
"""Where a stream's tokens are: with the stage before, on this one, with a later one. Elsewhere `local` has no data."""


class CallRanks(Protocol):
    """What a stream asks of the model call that it belongs to."""

    rank: int
    device: torch.device
    layout: TokenLayout

    def whole(self, stream: Stream) -> Tensor:
        """All tokens of a stream. A collective."""

    def beside(self, tensor: Tensor, dim: int) -> Stream:
        """A tensor that every rank has, as a stream without the picture's tokens."""

    def own(self, tensor: Tensor, dim: int, placement: Placement) -> Tensor:
        """Of a tensor that every rank has, what goes with this rank's tokens."""

    def moved(self, stream: Stream, placement: Placement) -> Tensor:
        """The tokens of a stream that another placement has on this rank. A collective."""


class Stream(DistributedTensor):
    """`local` are this rank's tokens along dimension `along`, in the order of `placement`; `side` is where they are.

    With a `grid` the model sees these dimensions in place of that one.
    """

    placement: Placement
    call: CallRanks
    side: int
    grid: tuple[int, ...]

    @staticmethod
    def __new__(
        cls,
        local: Tensor,
        placement: Placement,
        along: int,
        call: CallRanks,
        side: int = HERE,
        grid: tuple[int, ...] = (),
    ) -> Stream:
        """A tensor of the shape of the whole, without storage of its own."""
        assert local.shape[along] == placement.counts[call.rank]
        made = cls.of_part(local, along, grid or (placement.length,), call.device)
        made.placement, made.call, made.side, made.grid = placement, call, side, grid
        return made

    def like(self, local: Tensor, placement: Placement | None = None, side: int = HERE) -> Stream:
        """A stream of other tokens of this rank, by default in the same places."""
        return Stream(local, placement or self.placement, self.along, self.call, side, self.grid)

    def shown(self, whole: Tensor) -> Tensor:
        """All tokens as the model sees them."""
        return whole.unflatten(self.along, self.grid) if self.grid else whole

    def handed(self, tokens: Tensor) -> Tensor:
        """Some tokens as a block takes them."""
        if not self.grid:
            return tokens
        count = tokens.shape[self.along]
        every = count == self.placement.length
        return tokens.unflatten(self.along, self.grid if every else (count, *[1] * (len(self.grid) - 1)))

    def with_tokens(self, tokens: Tensor) -> Tensor:
        """The reverse of `handed`."""
        return tokens.flatten(self.along, self.along + len(self.grid) - 1) if self.grid else tokens

    def at(self, side: int) -> Stream:
        """The same tokens without data, with another stage."""
        return self.like(self.local.to("meta"), side=side)

    def leave(self, side: int) -> None:
        """Give the tokens to another stage."""
        self.local, self.side = self.local.to("meta"), side

    @classmethod
    def rules(cls, args: Sequence[Any], kwargs: Mapping[str, Any]) -> DispatchRules:
        """Joins and slices along tokens, and element-wise operations."""
        return RULES

    def whole(self) -> Tensor:
        """All tokens. A collective."""
        return self.call.whole(self)

    def own(self, tensor: Tensor, dim: int) -> Tensor:
        """What goes with this rank's tokens."""
        return self.call.own(tensor, dim, self.placement)


def _join(_func: Any, tensors: Sequence[Tensor], dim: int = 0) -> Any:
    """Along tokens; what is whole on all ranks is cut."""
    first = next(tensor for tensor in tensors if isinstance(tensor, Stream))
    if dim % first.ndim != first.along:
        return NotImplemented
    parts = [tensor if isinstance(tensor, Stream) else first.call.beside(tensor, first.along) for tensor in tensors]
    whole = (part.placement.everywhere or part.placement.replicated for part in parts)
    if any(whole) or any(part.along != first.along or part.grid for part in parts):
        return NotImplemented
    side = _side(parts)
    found = [part.local if side == HERE else part.local.to("meta") for part in parts]
    return first.like(
        torch.cat(found, dim=first.along), first.call.layout.joined([part.placement for part in parts]), side
    )


def _slice(
    func: Any, stream: Stream, dim: int = 0, start: int | None = None, stop: int | None = None, step: int = 1
) -> Any:
    if stream.grid:
        return NotImplemented
    dim %= stream.ndim
    first, last, _ = slice(start, stop).indices(stream.shape[dim])
    last = max(first, last)
    if dim != stream.along:
        return stream.like(func(stream.local, dim, first, last, step), side=stream.side)
    if step != 1:
        return NotImplemented
    part = stream.call.layout.part(stream.placement, first, last)
    begin = stream.placement.before(stream.call.rank, first)
    return stream.like(stream.local.narrow(dim, begin, part.counts[stream.call.rank]), part, stream.side)


def _side(streams: Sequence[Stream]) -> int:
    """Where a result of streams is: as far from this stage as any of them."""
    sides = {stream.side for stream in streams}
    assert not {LEFT, RIGHT} <= sides, "what an earlier and a later stage compute meets on this one"
    return RIGHT if RIGHT in sides else LEFT if LEFT in sides else HERE


def _element_wise(func: Any, *args: Any, **kwargs: Any) -> Any:
    tensors = [arg for arg in (*args, *kwargs.values()) if isinstance(arg, Tensor)]
    streams = [tensor for tensor in tensors if isinstance(tensor, Stream)]
    first = streams[0]
    if len(tensors) > 1 and any(stream.grid for stream in streams):
        return NotImplemented
    from_end = first.ndim - first.along
    elsewhere = [stream for stream in streams if not stream.placement.same_as(first.placement)]
    if any(stream.ndim - stream.along != from_end or stream.ndim != first.ndim for stream in streams):
        return NotImplemented
    if not all(_have_the_same(stream.placement, first.placement) for stream in elsewhere):
        return NotImplemented
    if any(tensor.ndim > first.ndim for tensor in tensors):
        return NotImplemented
    in_place = func._schema.is_mutable
    if in_place and not isinstance(args[0], Stream):
        return NotImplemented
    side = _side(streams)

    def part(tensor: Tensor) -> Tensor:
        own = tensor.local if isinstance(tensor, Stream) else first.part_of(tensor)
        if side != HERE and own.ndim:
            own = own.to("meta")
        if isinstance(tensor, Stream) and any(tensor is stream for stream in elsewhere):
            count = first.local.shape[first.along]
            return first.call.moved(tensor, first.placement) if side == HERE else _of_length(own, first.along, count)
        return own

    out = of_parts(func, part, args, kwargs)
    if not in_place:
        return first.like(out, side=side)
    if side != args[0].side:
        args[0].leave(side)
    return args[0]


def _have_the_same(one: Placement, other: Placement) -> bool:
    """Whether the same tokens lie on other ranks."""
    alike = one.length == other.length and one.everywhere == other.everywhere and one.replicated == other.replicated
    return alike and torch.equal(one.held, other.held)


def _of_length(tensor: Tensor, dim: int, count: int) -> Tensor:
    return tensor.new_empty((*tensor.shape[:dim], count, *tensor.shape[dim + 1 :]))


RULES = DispatchRules({aten.cat.default: _join, aten.slice.Tensor: _slice}, _element_wise)
