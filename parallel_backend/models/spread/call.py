"""Call: one model call on one sequence rank, of the whole sequence or of one patch."""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor

from ...comm.communicator import Communicator
from ...errors import Refused
from .declaration import Beside, Pictured, StreamKind
from .picture import Picture
from .placement import Placement, spread_evenly
from .stream import HERE, Stream


class StageOver(Exception):
    """This stage has done its part of the forward."""


class Call:
    """Where the tokens of one call are.

    Args:
        sequence: the ranks over which tokens are spread.
        picture: the latent.
        patches: into how many patches it is cut.
        patch: the one that is computed, or None for all.
        device: where tensors live.
    """

    def __init__(
        self, sequence: Communicator, picture: Picture, patches: int, patch: int | None, device: torch.device
    ) -> None:
        self.rank = sequence.rank
        self.device = device
        self.patch = patch
        self.patches = patches
        self.gathers = 0
        self.blocks_done = False
        self._sequence = sequence
        self._picture = picture
        self._patch_tokens = picture.patches(patches)
        self._known: dict[Hashable, Placement] = {}

    def placement(self, length: int, kind: StreamKind, kept: Tensor | None = None) -> Placement:
        """Where the tokens of a stream are.

        Args:
            kept: the positions of those that are not masked.
        """
        key = (length, kind, None if kept is None else tuple(kept.tolist()))
        if key not in self._known:
            whole = spread_evenly(length, self._by_patch(length, kind, kept), self._sequence.size)
            self._known[key] = whole if self.patch is None else whole.only(self.patch)
        return self._known[key]

    def _by_patch(self, length: int, kind: StreamKind, kept: Tensor | None) -> list[Tensor]:
        every = torch.arange(length) if kept is None else kept
        if not isinstance(kind, Pictured):
            return [every]
        tokens = self._picture.tokens
        start = kind.start(length, tokens)
        if not 0 <= start <= length - tokens:
            raise Refused(
                f"the model makes {length} tokens of what should hold the picture's {tokens}: use a width and height whose "
                f"latents are multiples of {' x '.join(map(str, self._picture.patch_size))}."
            )
        first, *others = (positions + start for positions in self._patch_tokens)
        around = every[(every < start) | (every >= start + tokens)]
        return [torch.cat([around, first]).sort().values, *others]

    def stream(self, tensor: Tensor, kind: StreamKind, kept: Tensor | None = None, dim: int = 1) -> Stream:
        """A tensor that every rank has, cut."""
        placement = self.placement(tensor.shape[dim], kind, kept)
        local = self.own(tensor, dim, placement)
        if local is not tensor:  # so that the whole can be freed
            local = local.clone(memory_format=torch.contiguous_format)
        return Stream(local, placement, dim, self)

    def beside(self, tensor: Tensor, dim: int) -> Stream:
        """A tensor that every rank has, as a stream without the picture's tokens."""
        return self.stream(tensor, Beside(), dim=dim)

    def own(self, tensor: Tensor, dim: int, placement: Placement) -> Tensor:
        """Of a tensor that every rank has, what goes with this rank's tokens."""
        return self.select(tensor, dim, placement.ranks[self.rank])

    def select(self, tensor: Tensor, dim: int, positions: Tensor) -> Tensor:
        """These positions along a dimension, in place where they are a run."""
        count = positions.numel()
        if count == tensor.shape[dim]:
            return tensor
        first = int(positions[0]) if count else 0
        if count == 0 or int(positions[-1]) - first == count - 1:
            return tensor.narrow(dim, first, count)
        return tensor.index_select(dim, positions.to(tensor.device))

    def whole(self, stream: Stream) -> Tensor:
        """All tokens of a stream; those of other patches are zero. A collective.

        Raises:
            StageOver: another stage has them.
        """
        if stream.side != HERE:
            raise StageOver
        assert self.patch is None or self.blocks_done, "a patch's tokens were gathered between blocks"
        self.gathers += 1
        placement, dim = stream.placement, stream.along
        if self._sequence.size == 1 and placement.counts[0] == placement.length:
            return stream.local
        local = stream.local.movedim(dim, 1)
        everyone = self._sequence.gather(local.flatten(2), placement.counts)
        order = torch.cat(placement.ranks).to(everyone.device)
        whole = everyone.new_zeros(everyone.shape[0], placement.length, everyone.shape[2])
        whole.index_copy_(1, order, everyone)
        return whole.view(local.shape[0], placement.length, *local.shape[2:]).movedim(1, dim)
