"""A tensor that has the shape of the whole and whose tokens lie on all sequence ranks.

The model's operations between its blocks are then right by construction. Joins and slices along tokens and element-wise
operations stay local. A slice is a view, so an in-place addition to a slice changes the stream. Tokens of operands that lie on
other ranks are moved to the ranks of the first operand's tokens. Any other operation first gathers the whole tensor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any, Protocol

import torch
from torch import Tensor

from ...distributed_tensor import DispatchRules, DistributedTensor, of_parts
from .placement import Placement
from .token_layout import TokenLayout

aten = torch.ops.aten


class StagePosition(Enum):
    """The pipeline stage that has a stream's tokens, relative to this rank's stage."""

    BEFORE = "before"
    LOCAL = "local"
    AFTER = "after"


class CallRanks(Protocol):
    """The operations that a stream needs from its model call."""

    rank: int
    device: torch.device
    layout: TokenLayout

    def whole(self, stream: Stream) -> Tensor:
        """Return all tokens of a stream. A collective."""

    def without_latent_tokens(self, tensor: Tensor, dim: int) -> Stream:
        """Return a stream without latent tokens from a tensor that every rank has."""

    def own(self, tensor: Tensor, dim: int, placement: Placement) -> Tensor:
        """Return the rows of a tensor, which every rank has, for this rank's tokens."""

    def moved(self, stream: Stream, placement: Placement) -> Tensor:
        """Return the tokens of a stream that another placement has on this rank. A collective."""


class Stream(DistributedTensor):
    """A tensor of the full shape whose tokens lie on all sequence ranks.

    `local` has this rank's tokens along dimension `along`, in the order of `placement`. `stage_position` names the stage that
    has them; `local` has no data unless that is this rank's stage. With a `grid`, the model sees these dimensions instead of
    dimension `along`.
    """

    placement: Placement
    call: CallRanks
    stage_position: StagePosition
    grid: tuple[int, ...]

    @staticmethod
    def __new__(
        cls,
        local: Tensor,
        placement: Placement,
        along: int,
        call: CallRanks,
        stage_position: StagePosition = StagePosition.LOCAL,
        grid: tuple[int, ...] = (),
    ) -> Stream:
        """Return a stream with the full shape and no storage of its own."""
        assert local.shape[along] == placement.counts[call.rank]
        stream = cls.of_part(local, along, grid or (placement.length,), call.device)
        stream.placement, stream.call, stream.stage_position, stream.grid = placement, call, stage_position, grid
        return stream

    def like(
        self,
        local: Tensor,
        placement: Placement | None = None,
        stage_position: StagePosition = StagePosition.LOCAL,
    ) -> Stream:
        """Return a stream of other tokens of this rank, by default with the same placement."""
        return Stream(local, placement or self.placement, self.along, self.call, stage_position, self.grid)

    def unflatten_tokens(self, whole: Tensor) -> Tensor:
        """Give the tensor of all tokens the dimensions that the model sees."""
        return whole.unflatten(self.along, self.grid) if self.grid else whole

    def block_input(self, tokens: Tensor) -> Tensor:
        """Give some of the tokens the dimensions that a block expects."""
        if not self.grid:
            return tokens
        count = tokens.shape[self.along]
        every = count == self.placement.length
        return tokens.unflatten(self.along, self.grid if every else (count, *[1] * (len(self.grid) - 1)))

    def with_tokens(self, tokens: Tensor) -> Tensor:
        """Flatten the dimensions of a grid; reverse `block_input`."""
        return tokens.flatten(self.along, self.along + len(self.grid) - 1) if self.grid else tokens

    def at(self, stage_position: StagePosition) -> Stream:
        """Return a stream without data, whose tokens another stage has."""
        return self.like(self.local.to("meta"), stage_position=stage_position)

    def leave(self, stage_position: StagePosition) -> None:
        """Drop the local data and record that another stage has the tokens."""
        self.local, self.stage_position = self.local.to("meta"), stage_position

    @classmethod
    def rules(cls, args: Sequence[Any], kwargs: Mapping[str, Any]) -> DispatchRules:
        """Return the rules for joins and slices along tokens, and for element-wise operations."""
        return RULES

    def whole(self) -> Tensor:
        """Return all tokens. A collective."""
        return self.call.whole(self)

    def own(self, tensor: Tensor, dim: int) -> Tensor:
        """Return the rows of `tensor` along `dim` for this rank's tokens."""
        return self.call.own(tensor, dim, self.placement)


def _join(_func: Any, tensors: Sequence[Tensor], dim: int = 0) -> Any:
    """Concatenate tensors along tokens. Tensors that every rank has in full are cut first."""
    first = next(tensor for tensor in tensors if isinstance(tensor, Stream))
    if dim % first.ndim != first.along:
        return NotImplemented
    parts = [
        tensor if isinstance(tensor, Stream) else first.call.without_latent_tokens(tensor, first.along)
        for tensor in tensors
    ]
    whole = (part.placement.everywhere or part.placement.replicated for part in parts)
    if any(whole) or any(part.along != first.along or part.grid for part in parts):
        return NotImplemented
    stage_position = _stage_position(parts)
    is_local = stage_position == StagePosition.LOCAL
    tokens = [part.local if is_local else part.local.to("meta") for part in parts]
    placement = first.call.layout.joined([part.placement for part in parts])
    return first.like(torch.cat(tokens, dim=first.along), placement, stage_position)


def _slice(
    func: Any, stream: Stream, dim: int = 0, start: int | None = None, stop: int | None = None, step: int = 1
) -> Any:
    if stream.grid:
        return NotImplemented
    dim %= stream.ndim
    first, last, _ = slice(start, stop).indices(stream.shape[dim])
    last = max(first, last)
    if dim != stream.along:
        return stream.like(func(stream.local, dim, first, last, step), stage_position=stream.stage_position)
    if step != 1:
        return NotImplemented
    part = stream.call.layout.part(stream.placement, first, last)
    begin = stream.placement.before(stream.call.rank, first)
    return stream.like(stream.local.narrow(dim, begin, part.counts[stream.call.rank]), part, stream.stage_position)


def _stage_position(streams: Sequence[Stream]) -> StagePosition:
    """Return the stage position of a result of these streams: local only if all of them are local."""
    positions = {stream.stage_position for stream in streams} - {StagePosition.LOCAL}
    assert len(positions) <= 1, "what an earlier and a later stage compute meets on this one"
    return positions.pop() if positions else StagePosition.LOCAL


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
    if not all(_same_tokens(stream.placement, first.placement) for stream in elsewhere):
        return NotImplemented
    if any(tensor.ndim > first.ndim for tensor in tensors):
        return NotImplemented
    in_place = func._schema.is_mutable
    if in_place and not isinstance(args[0], Stream):
        return NotImplemented
    stage_position = _stage_position(streams)
    is_local = stage_position == StagePosition.LOCAL

    def part(tensor: Tensor) -> Tensor:
        own = tensor.local if isinstance(tensor, Stream) else first.part_of(tensor)
        if not is_local and own.ndim:
            own = own.to("meta")
        if isinstance(tensor, Stream) and any(tensor is stream for stream in elsewhere):
            count = first.local.shape[first.along]
            return first.call.moved(tensor, first.placement) if is_local else _of_length(own, first.along, count)
        return own

    out = of_parts(func, part, args, kwargs)
    if not in_place:
        return first.like(out, stage_position=stage_position)
    if stage_position != args[0].stage_position:
        args[0].leave(stage_position)
    return args[0]


def _same_tokens(first: Placement, second: Placement) -> bool:
    """Return True if two placements hold the same tokens, on any ranks."""
    same_shape = first.length == second.length
    same_kind = first.everywhere == second.everywhere and first.replicated == second.replicated
    return same_shape and same_kind and torch.equal(first.all_positions, second.all_positions)


def _of_length(tensor: Tensor, dim: int, count: int) -> Tensor:
    return tensor.new_empty((*tensor.shape[:dim], count, *tensor.shape[dim + 1 :]))


RULES = DispatchRules({aten.cat.default: _join, aten.slice.Tensor: _slice}, _element_wise)
