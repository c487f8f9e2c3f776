"""The token positions of one model call on one sequence rank, for the whole sequence or for one patch."""

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
    """Raised when this stage has done its part of the forward."""


class CallLayout:
    """The token positions of one model call, and the exchanges of tokens between its ranks.

    Args:
        sequence: the ranks that divide the tokens.
        layout: the token layout of the call's latent and patch.
        device: the device of the tensors.
    """

    def __init__(self, sequence: Communicator, layout: TokenLayout, device: torch.device) -> None:
        self.rank = sequence.rank
        self.device = device
        self.layout = layout
        self.gathers = 0
        self.blocks_done = False
        self.arguments: Mapping[str, Any] = {}
        """The model's arguments besides latent and timestep."""
        self._sequence = sequence
        self._cache: dict[Hashable, tuple[object, Any]] = {}

    def once(self, value: object, key: Hashable, make: Callable[[], T]) -> T:
        """Return the result of `make` for a value that the model passes to each of its blocks. Call `make` only once."""
        entry = self._cache.get((id(value), key))
        if entry is None:
            entry = self._cache[id(value), key] = value, make()  # holding the value keeps its id from being used again
        return entry[1]  # type: ignore[no-any-return]

    def end(self) -> None:
        """Drop the model's arguments. Its options refer back to this object, so only the garbage collector would free them."""
        self.arguments = {}
        self._cache.clear()

    def stream(
        self, tensor: Tensor, kind: StreamKind, unmasked: Tensor | None = None, dim: int | None = None, prefix: int = 0
    ) -> Stream:
        """Return a stream with this rank's tokens of a tensor that every rank has.

        Args:
            unmasked: the positions of the tokens that no mask hides; None for all.
            dim: the dimension of the tokens; None for the one that `kind` names.
            prefix: the number of first tokens that every rank keeps.
        """
        dim = kind.dim if dim is None else dim
        grid: tuple[int, ...] = ()
        if isinstance(kind, LatentTokens) and kind.grid:
            grid, tensor = tuple(tensor.shape[dim:-1]), tensor.flatten(dim, -2)
        trailing = kind.trailing(self.arguments) if isinstance(kind, LatentTokens) and kind.trailing else 0
        placement = self.layout.of(tensor.shape[dim], kind, unmasked, trailing, prefix)
        chosen = self._own(placement)
        local = chosen(tensor, dim)
        if local is not tensor and chosen.index is None:  # a view would keep the whole tensor in memory
            local = local.clone(memory_format=torch.contiguous_format)
        return Stream(local, placement, dim, self, grid=grid)

    def without_latent_tokens(self, tensor: Tensor, dim: int) -> Stream:
        """Return a stream without latent tokens from a tensor that every rank has."""
        return self.stream(tensor, FirstPatchTokens(), dim=dim)

    def own(self, tensor: Tensor, dim: int, placement: Placement) -> Tensor:
        """Return the entries of a tensor, which every rank has, for this rank's tokens."""
        return self._own(placement)(tensor, dim)

    def _own(self, placement: Placement) -> Selection:
        return self.selection(("own", placement), lambda: placement.ranks[self.rank])

    def selection(self, key: Hashable, positions: Callable[[], Tensor]) -> Selection:
        """Return the selection of positions that follow from the layout. It is computed once for each key."""
        return self.layout.once(key, lambda: Selection.of(positions(), self.device))

    def whole(self, stream: Stream) -> Tensor:
        """Gather all tokens of a stream; tokens of other patches are zero. A collective.

        Raises:
            StageOver: another stage has the tokens.
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
        """Return the tokens of a stream that `placement` puts on this rank. A collective.

        The stream's own placement and `placement` hold the same tokens on all ranks together: those of a patch, or all.
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
