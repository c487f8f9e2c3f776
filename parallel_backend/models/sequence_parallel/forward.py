"""The state that the blocks of one running forward share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from torch import Tensor
from torch.utils._pytree import tree_leaves

from ...mesh import Mesh
from .arrivals import Arrivals
from .attentions import Attentions
from .call_layout import CallLayout
from .compiled import CompiledBlocks
from .modulation import Vector
from .stream import StagePosition, Stream

if TYPE_CHECKING:
    from ...weights.stores.store import BlockAccess

T = TypeVar("T")


@dataclass
class RankForward:
    """One forward on one rank.

    Attributes:
        call: the layout of the forward's tokens.
        attentions: computes the calls of attention.
        mesh: this rank's communicators.
        arrivals: the streams that arrive from the previous stage.
        access: makes the weights of this rank's blocks usable while they run.
        on_progress: called after each unit, which is the blocks that one stage must hold together.
        cached: values that depend only on sizes and the prompt, kept for the whole run.
        modulations: modulations of the patches before this one of the same model call; None if they are not kept.
        compiled: runs the blocks, if they are to be compiled.
        turns: the number of runs of each block, by the block's number. VACE's blocks run once for each control video.
    """

    call: CallLayout
    attentions: Attentions
    mesh: Mesh
    arrivals: Arrivals
    access: BlockAccess
    on_progress: Callable[[], None]
    cached: dict[Hashable, Any]
    modulations: dict[Hashable, Any] | None = None
    compiled: CompiledBlocks | None = None
    turns: Counter[Hashable] = field(default_factory=Counter)

    def turn(self, block: Hashable) -> int:
        """Count a run of a block, and return the number of runs before it."""
        self.turns[block] += 1
        return self.turns[block] - 1

    def once_a_run(self, location: Hashable, inputs: Sequence[Any], make: Callable[[], T]) -> T:
        """Return the result of `make`, computed once a run for each location in the model's forward and shapes of inputs."""
        shapes = tuple(leaf.shape for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor))
        key = location, self.turn(location), shapes
        if key not in self.cached:
            self.cached[key] = make()
        return self.cached[key]  # type: ignore[no-any-return]

    def modulation(self, location: Hashable, tensor: Tensor, make: Callable[[Vector], T]) -> T:
        """Return a modulation, computed once for all patches of the model call."""
        if self.modulations is None:
            return make(self._vector(tensor))
        key = location, self.turn(location)
        if key not in self.modulations:
            self.modulations[key] = make(self._vector(tensor))
        return self.modulations[key]  # type: ignore[no-any-return]

    def _vector(self, tensor: Tensor) -> Vector:
        return self.call.once(tensor, Vector, lambda: Vector(tensor))

    def received(self, stream: Stream) -> Stream:
        """Return the stream with its tokens on this rank. Tokens of the previous stage are received first."""
        assert stream.stage_position != StagePosition.AFTER, "a stage needs what a later one computes"
        if stream.stage_position == StagePosition.LOCAL:
            return stream
        return stream.like(self.arrivals.take(stream.local.shape, stream.dtype))

    def hand_on(self, stream: Stream) -> None:
        """Send a stream's tokens to the next stage, once. Tokens of the previous stage are received and passed on."""
        if stream.stage_position == StagePosition.AFTER:
            return
        self.mesh.to_next_stage.send(self.received(stream).local, self.mesh.pipefusion.rank + 1)
        stream.leave(StagePosition.AFTER)
