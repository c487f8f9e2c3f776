"""Call: one model call on one sequence rank, of the whole sequence or of one patch."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

from ...comm.communicator import Communicator
from ...declaration import FirstPatchTokens, LatentTokens, StreamKind
from .placement import Placement, Selection
from .stream import StagePosition, Stream
from .token_layout import TokenLayout

T = TypeVar("T")


class StageOver(Exception):
    """This stage has done its part of the forward."""


class CallLayout:
    """Where the tokens of one call are.

    Args:
        sequence: the ranks over which tokens are spread.
        layout: of the call's latent and patch.
        device: where tensors live.
    """

    def __init__(self, sequence: Communicator, layout: TokenLayout, device: torch.device) -> None:
        self.rank = sequence.rank
        self.device = device
        self.layout = layout
        self.gathers = 0
        self.blocks_done = False
        self.arguments: Mapping[str, Any] = {}
        """What the model is given besides latent and timestep."""
        self._sequence = sequence
        self._cache: dict[Hashable, tuple[object, Any]] = {}

    def once(self, value: object, key: Hashable, make: Callable[[], T]) -> T:
        """What `make` makes of a value, which the model gives to each of its blocks."""
        entry = self._cache.get((id(value), key))
        if entry is None:
            entry = self._cache[id(value), key] = value, make()  # with the value, whose id is then no other's
        return entry[1]  # type: ignore[no-any-return]

    def end(self) -> None:
        """Drop what the model gave: its options lead back here, so that it would stay until garbage is collected."""
        self.arguments = {}
        self._cache.clear()

    def stream(
        self, tensor: Tensor, kind: StreamKind, unmasked: Tensor | None = None, dim: int | None = None, prefix: int = 0
    ) -> Stream:
        """A tensor that every rank has, cut along `dim`, by default that of its kind; each rank keeps a `prefix`."""
        dim = kind.dim if dim is None else dim
        grid: tuple[int, ...] = ()
        if isinstance(kind, LatentTokens) and kind.grid:
            grid, tensor = tuple(tensor.shape[dim:-1]), tensor.flatten(dim, -2)
        trailing = kind.trailing(self.arguments) if isinstance(kind, LatentTokens) and kind.trailing else 0
        placement = self.layout.of(tensor.shape[dim], kind, unmasked, trailing, prefix)
        chosen = self._own(placement)
        local = chosen(tensor, dim)
        if local is not tensor and chosen.index is None:  # so that the whole can be freed
            local = local.clone(memory_format=torch.contiguous_format)
        return Stream(local, placement, dim, self, grid=grid)

    def without_latent_tokens(self, tensor: Tensor, dim: int) -> Stream:
        """A tensor that every rank has, as a stream without the picture's tokens."""
        return self.stream(tensor, FirstPatchTokens(), dim=dim)

    def own(self, tensor: Tensor, dim: int, placement: Placement) -> Tensor:
        """Of a tensor that every rank has, what goes with this rank's tokens."""
        return self._own(placement)(tensor, dim)

    def _own(self, placement: Placement) -> Selection:
        return self.selection(("own", placement), lambda: placement.ranks[self.rank])

    def selection(self, key: Hashable, positions: Callable[[], Tensor]) -> Selection:
        """Of positions that follow from the layout, under a key."""
        return self.layout.once(key, lambda: Selection.of(positions(), self.device))

    def whole(self, stream: Stream) -> Tensor:
        """All tokens of a stream; those of other patches are zero. A collective.

        Raises:
            StageOver: another stage has them.
        """
        if stream.stage_position != StagePosition.LOCAL:
            raise StageOver
        assert self.layout.patch is None or self.blocks_done, "a patch's tokens were gathered between blocks"
        placement, dim = stream.placement, stream.along
        if placement.everywhere:
            return stream.unflatten_tokens(stream.local)
        self.gathers += 1
        if self._sequence.size == 1 and placement.counts[0] == placement.length:
            return stream.unflatten_tokens(stream.local)
        local = stream.local.movedim(dim, 1) if dim else stream.local[None]
        everyone = self._sequence.all_gather(local.flatten(2), placement.counts)
        order = self.selection(("order", placement), lambda: torch.cat(placement.ranks))
        whole = everyone
        if order.index is not None or order.count < placement.length:
            whole = everyone.new_zeros(everyone.shape[0], placement.length, everyone.shape[2])
            if order.index is None:
                whole[:, order.start : order.start + order.count] = everyone
            else:
                whole.index_copy_(1, order.index, everyone)
        whole = whole.view(local.shape[0], placement.length, *local.shape[2:])
        return stream.unflatten_tokens(whole.movedim(1, dim) if dim else whole[0])

    def moved(self, stream: Stream, placement: Placement) -> Tensor:
        """Of a stream that is cut otherwise, the tokens that another stream of its length has on this rank. A collective.

        Both have the same tokens on all ranks together: those of a patch, or all.
        """
        source, dim = stream.placement, stream.along
        if source.everywhere:
            return self.own(stream.local, dim, placement)
        self.gathers += 1
        local = stream.local.movedim(dim, 1) if dim else stream.local[None]
        everyone = self._sequence.all_gather(local.flatten(2), source.counts)
        chosen = self.selection(("moved", source, placement), lambda: source.indices_of(placement.ranks[self.rank]))
        own = chosen(everyone, 1).view(local.shape[0], -1, *local.shape[2:])
        return own.movedim(1, dim) if dim else own[0]
