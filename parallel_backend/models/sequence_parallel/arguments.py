"""The arguments of a block: checks against the declaration, and their conversion to this rank's tokens."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from ...declaration import (
    Argument,
    AttentionBias,
    BlockGroup,
    InjectedAttention,
    PerFrame,
    PerFramePart,
    PerToken,
    PerTokenObject,
    Replicated,
    ReplicatedContext,
    StreamKind,
    TextLength,
    TextMask,
    TokenPosition,
    TokenRanges,
)
from ...errors import Refused
from ...transfers import to_device
from .call_layout import CallLayout
from .placement import Placement
from .stream import Stream

OPTIONS = "transformer_options"
"""The argument by which ComfyUI passes options to attention. Every block may have it."""

IDLE = torch.zeros(1, dtype=torch.int64)
"""The position of the idle token of a rank that has no tokens of a stream.

Models reshape with -1, which an empty tensor does not support.
"""

MASKED = -1e4
"""The bound below which a number that is added to attention scores masks a token."""


PLACED = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
"""The kinds of parameters that may be passed by position."""


class Arguments:
    """The arguments of the blocks of one group.

    Raises:
        Refused: the block lacks the group's method, or the method lacks a declared argument.
    """

    def __init__(self, group: BlockGroup, block: nn.Module) -> None:
        self._group = group
        self._name = type(block).__name__
        method = getattr(block, group.method, None)
        if method is None:
            raise Refused(
                f"the model's {self._name} has no {group.method}: this ComfyUI is newer or older than this pack knows; update "
                "the pack, or use Load Diffusion Model."
            )
        self._signature = inspect.signature(method)
        kinds = {p.kind: p.name for p in self._signature.parameters.values()}
        self._rest = kinds.get(inspect.Parameter.VAR_KEYWORD)
        single = [p for p in self._signature.parameters.values() if p.kind in (*PLACED, inspect.Parameter.KEYWORD_ONLY)]
        self._positional = tuple(p.name for p in single if p.kind in PLACED)
        self._needed = frozenset(p.name for p in single if p.default is inspect.Parameter.empty)
        self._accepted = frozenset(p.name for p in single)
        self._unnamed = tuple(group.streams) if inspect.Parameter.VAR_POSITIONAL in kinds else ()
        """The names of the arguments that are passed by position to a forward with `*args`, as linear layers have."""
        in_tuples = {name for names in group.tuples.values() for name in names}
        optional = {name for name, argument in group.arguments.items() if isinstance(argument, InjectedAttention)}
        named = {*group.streams, *group.arguments} - in_tuples - optional | set(group.tuples)
        missing = sorted(named - set(self._signature.parameters))
        if missing and not self._rest:
            raise Refused(
                f"the model's {self._name} has no argument {', '.join(missing)}: this ComfyUI or diffusers is newer or older "
                "than this pack knows; update the pack, or use Load Diffusion Model."
            )

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return all values by name, as the model passed them.

        Raises:
            Refused: an argument is not declared.
        """
        if self._unnamed:
            return {**dict(zip(self._unnamed, args, strict=True)), **kwargs}
        # Signature.bind takes longer than all other code here and would run for each block, so plain calls avoid it.
        values = {**dict(zip(self._positional, args, strict=False)), **kwargs}
        plain = len(args) <= len(self._positional) and len(values) == len(args) + len(kwargs)
        if not plain or not self._needed <= values.keys() <= self._accepted:
            values = dict(self._signature.bind(*args, **kwargs).arguments)
        if self._rest is not None:
            values |= values.pop(self._rest, {})
        for name, names in self._group.tuples.items():
            values |= zip(names, values.pop(name), strict=True)
        for name, value in values.items():
            declared = name in self._group.streams or name in self._group.arguments or name == OPTIONS
            if not declared and value is not None:
                raise self._refused(name, "is not supported")
        return values

    def call(self, forward: Callable[..., Any], local: Mapping[str, Any]) -> Any:
        """Call the block's forward with these values."""
        named = {name: value for name, value in local.items() if name not in self._unnamed}
        for name, names in self._group.tuples.items():
            named[name] = tuple(named.pop(each) for each in names)
        return forward(*(local[name] for name in self._unnamed), **named)

    def unmasked(self, values: Mapping[str, Any], stream: str) -> Tensor | None:
        """Return the positions of a stream that no mask hides and no length leaves out; None for all."""
        for name, argument in self._group.arguments.items():
            value = values.get(name)
            if value is None:
                continue
            if isinstance(argument, TextLength) and argument.stream == stream:
                return torch.arange(min(int(value), values[stream].shape[1]))
            if isinstance(argument, TextMask) and argument.stream == stream:
                before, length, trailing = (
                    sum(values[each].shape[1] for each in streams)
                    for streams in (argument.before, (stream,), argument.after)
                )
                return self._visible(name, value, before, length, before + length + trailing)
        return None

    def _visible(self, name: str, mask: Tensor, start: int, length: int, total: int) -> Tensor:
        """Return the unmasked positions of a text of `length` tokens that begins at `start` of the mask's `total` tokens."""
        rows = mask.reshape(mask.shape[0], -1)
        if rows.shape[1] != total:
            raise self._refused(name, f"is for {rows.shape[1]} tokens and the text has {total}, which is not supported")
        hidden = rows < MASKED if rows.is_floating_point() else rows == 0
        plain = not rows.is_floating_point() or bool(((rows == 0) | hidden).all())
        if not plain or bool((hidden != hidden[:1]).any()):
            raise self._refused(name, "has weights for tokens, or differs within a batch, which is not supported")
        text = hidden[0, start : start + length]
        if int(hidden[0].sum()) > int(text.sum()):
            raise self._refused(name, "hides tokens of the picture, which is not supported")
        return torch.arange(length)[~text.cpu()]

    def local(self, values: Mapping[str, Any], streams: Mapping[str, Stream], call: CallLayout) -> dict[str, Any]:
        """Return the arguments of the block on this rank.

        Raises:
            Refused: a value has a size that is not supported, or differs among ranks and must be the same.
        """
        local_values = dict(values)
        for name, stream in streams.items():
            empty = not stream.local.shape[stream.along] and not stream.placement.everywhere
            local_values[name] = stream.block_input(_idle(stream) if empty else stream.local)
        placements = {name: stream.placement for name, stream in streams.items()}
        batch = next((stream.shape[0] for stream in streams.values() if stream.along), 1)
        for name, argument in self._group.arguments.items():
            value = values.get(name)
            if value is not None:
                key = argument, *placements.values()  # the objects, because an id may be used again
                make = functools.partial(self._local, name, value, argument, placements, batch, call)
                local_values[name] = call.once(value, key, make)
        return local_values

    def _local(
        self,
        name: str,
        value: Any,
        argument: Argument,
        placements: Mapping[str, Placement],
        batch: int,
        call: CallLayout,
    ) -> Any:
        match argument:
            case PerToken(streams, dim):
                stream_placements = [placements[stream] for stream in streams]
                total = sum(placement.length for placement in stream_placements)
                chosen = call.selection(
                    ("along", *stream_placements), lambda: _concatenated_positions(stream_placements, call.rank)
                )

                def along(tensor: Tensor) -> Tensor:
                    if tensor.shape[dim] != total:
                        raise self._refused(
                            name, f"has {tensor.shape[dim]} entries for {total} tokens, which is not supported"
                        )
                    return chosen(tensor, dim)

                return tree_map_only(Tensor, along, value)
            case TokenRanges(stream):
                run, length = positions_of(placements[stream], call.rank), placements[stream].length
                return [self._segment(name, run, length, *segment) for segment in value]
            case TokenPosition(stream):
                return _before(positions_of(placements[stream], call.rank), value)
            case PerFrame(stream, dims):
                return value if value.ndim < dims else _by_frame(value, placements[stream], call)
            case PerFramePart(stream, each, whole):
                return self._by_part(name, value, each, whole, self._group.streams[stream], placements[stream], call)
            case PerTokenObject(stream, take):
                positions, length = positions_of(placements[stream], call.rank), placements[stream].length
                return value if len(positions) == length else take(value, positions, length)
            case AttentionBias(stream, of):
                weights = of(value)
                return weights.index_select(0, to_device(positions_of(placements[stream], call.rank), weights.device))
            case TextMask():
                return None
            case TextLength(stream):
                return len(positions_of(placements[stream], call.rank))
            case Replicated(rows):
                for tensor in self._whole(name, value):
                    if rows and not _are_vectors(tensor.shape, rows, batch):
                        expected = f"{' or '.join(map(str, rows))} vectors for each of a batch of {batch}"
                        raise self._refused(
                            name,
                            f"has the shape {list(tensor.shape)}, and only {expected} are supported",
                        )
                return value
            case InjectedAttention():
                return value
            case ReplicatedContext():
                for tensor in self._whole(name, value):
                    if tensor.ndim and tensor.shape[0] not in (1, batch):
                        raise self._refused(
                            name, f"is for {tensor.shape[0]} items of a batch of {batch}, which is not supported"
                        )
                return value

    def _whole(self, name: str, value: Any) -> list[Tensor]:
        """Return the tensors in a value that must be the same on all ranks. Raise Refused if a tensor is a stream."""
        tensors = [leaf for leaf in _leaves(value) if isinstance(leaf, Tensor | Stream)]
        if any(isinstance(tensor, Stream) for tensor in tensors):
            raise self._refused(name, "differs from GPU to GPU, which is not supported")
        return tensors

    def _segment(
        self, name: str, run: Tensor, length: int, start: int | None, stop: int | None, *tensors: Any
    ) -> tuple[Any, ...]:
        """Return a tuple of `TokenRanges` for this rank's tokens.

        Args:
            run: the positions of this rank's tokens.
            length: the number of tokens of the stream.
            tensors: the entries of the tuple after `stop`.
        """
        first, last = _before(run, start), _before(run, stop)
        begin, end, _ = slice(start, stop).indices(length)

        def rows(tensor: Tensor) -> Tensor:
            if tensor.ndim == 0:
                return tensor
            if tensor.shape[0] != end - begin:
                raise self._refused(
                    name, f"has {tensor.shape[0]} entries for {end - begin} tokens, which is not supported"
                )
            return tensor.index_select(0, to_device(run[first:last] - begin, tensor.device))

        return first, last, *(tree_map_only(Tensor, rows, value) for value in tensors)

    def _by_part(
        self,
        name: str,
        value: Any,
        rows_per_part: int,
        whole: bool,
        kind: StreamKind,
        placement: Placement,
        call: CallLayout,
    ) -> Tensor:
        """Return the entries of a `PerFramePart` tensor for each run of this rank's tokens."""
        positions = positions_of(placement, call.rank)
        if positions.numel() == placement.length:
            return value  # type: ignore[no-any-return]
        part, run = call.layout.part_of(kind)
        count, expected = value.shape[1] // rows_per_part, (placement.length if whole else call.layout.tokens) // part
        if count != expected:  # the block would divide the entries evenly, and not at the ends of a frame's parts
            raise self._refused(name, f"has {count} entries for {expected} parts of the latent, which is not supported")

        def parts() -> Tensor:
            own = positions[positions < count * part]
            return to_device(torch.div(own[::run], part, rounding_mode="floor"), value.device)

        chosen = call.layout.once(("parts", placement, kind, count), parts)
        return value.unflatten(1, (-1, rows_per_part)).index_select(1, chosen).flatten(1, 2)

    def _refused(self, name: str, reason: str) -> Refused:
        return Refused(
            f"{name} of the model's {self._name} {reason} with a parallel MODEL: remove the node that sets it, or use Load "
            "Diffusion Model."
        )


def positions_of(placement: Placement, rank: int) -> Tensor:
    """Return the positions of a rank's tokens, or of the idle token if the rank has none."""
    positions = placement.ranks[rank]
    return positions if positions.numel() else IDLE


def _leaves(value: Any) -> Iterator[Any]:
    """Yield the leaves of lists, tuples, dicts and dataclasses (ComfyUI has dataclasses for modulation)."""
    for leaf in tree_leaves(value):
        if is_dataclass(leaf) and not isinstance(leaf, type):
            yield from _leaves([getattr(leaf, field.name) for field in fields(leaf)])
        else:
            yield leaf


def _are_vectors(shape: Sequence[int], rows: Sequence[int], batch: int) -> bool:
    """Return True if a shape is one of `rows` vectors for each batch item, or for the whole batch.

    The vectors may be consecutive in the first dimension, or lie along the dimensions between the first and the last.
    """
    if len(shape) < 2:
        return True
    between = math.prod(shape[1:-1])
    in_sequence = between == 1 and any(shape[0] in (count, batch * count) for count in rows)
    return in_sequence or (between in rows and shape[0] in (1, batch))


def _idle(stream: Stream) -> Tensor:
    shape = list(stream.local.shape)
    shape[stream.along] = 1
    return stream.local.new_zeros(shape)


def _before(positions: Tensor, edge: int | None) -> int | None:
    return None if edge is None else int(torch.searchsorted(positions, edge))


def _concatenated_positions(placements: Sequence[Placement], rank: int) -> Tensor:
    offset, runs = 0, []
    for placement in placements:
        runs.append(positions_of(placement, rank) + offset)
        offset += placement.length
    return torch.cat(runs)


def _by_frame(value: Tensor, placement: Placement, call: CallLayout) -> Tensor:
    """Return a row for each of this rank's tokens. A frame's row is repeated as ComfyUI's Wan repeats it (`repeat_e`)."""
    frames, length = value.shape[1], placement.length
    positions = positions_of(placement, call.rank)
    if frames == 1 or positions.numel() == length:  # the block itself repeats the rows
        return value

    def rows() -> Tensor:
        tokens_per_frame = length // frames
        each_frame = torch.div(
            positions,
            tokens_per_frame if tokens_per_frame * frames == length else tokens_per_frame + 1,
            rounding_mode="floor",
        )
        return to_device(each_frame, value.device)

    return value.index_select(1, call.layout.once(("frames", placement, frames), rows))
