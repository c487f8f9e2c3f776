"""Forward: what the blocks of one running forward share."""

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
        call: where its tokens are.
        attentions: answers the calls of attention.
        mesh: this rank's communicators.
        arrivals: what comes from the stage before.
        access: how this rank makes the weights of its blocks usable.
        on_progress: called after each block.
        kept: what is kept for a run of what follows from sizes and the prompt alone.
        modulations: of the model call's patches before this one; None where they are not kept.
        compiled: runs the blocks, if they are to be compiled.
        turns: how often each block has run, by number; VACE's run once for each control video.
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
        """How often a block has run before; counts this time too."""
        self.turns[block] += 1
        return self.turns[block] - 1

    def once_a_run(self, location: Hashable, inputs: Sequence[Any], make: Callable[[], T]) -> T:
        """What `make` gave at this place of the model's forward, for arguments of these shapes, when it was first asked."""
        shapes = tuple(leaf.shape for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor))
        key = location, self.turn(location), shapes
        if key not in self.cached:
            self.cached[key] = make()
        return self.cached[key]  # type: ignore[no-any-return]

    def modulation(self, location: Hashable, tensor: Tensor, make: Callable[[Vector], T]) -> T:
        """What `make` gave for an earlier patch of the model call, or gives now."""
        if self.modulations is None:
            return make(self._vector(tensor))
        key = location, self.turn(location)
        if key not in self.modulations:
            self.modulations[key] = make(self._vector(tensor))
        return self.modulations[key]  # type: ignore[no-any-return]

    def _vector(self, tensor: Tensor) -> Vector:
        return self.call.once(tensor, Vector, lambda: Vector(tensor))

    def received(self, stream: Stream) -> Stream:
        """A stream with its tokens here: those that the stage before has come from there."""
        assert stream.stage_position != StagePosition.AFTER, "a stage needs what a later one computes"
        if stream.stage_position == StagePosition.LOCAL:
            return stream
        return stream.like(self.arrivals.take(stream.local.shape, stream.dtype))

    def hand_on(self, stream: Stream) -> None:
        """Send a stream's tokens to the next stage, once; those of the stage before pass through."""
        if stream.stage_position == StagePosition.AFTER:
            return
        self.mesh.to_next_stage.send(self.received(stream).local, self.mesh.pipefusion.rank + 1)
        stream.leave(StagePosition.AFTER)
