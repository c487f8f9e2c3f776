"""One forward of a model of ComfyUI's on one rank: its stage, for the whole sequence or for one patch."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...errors import Refused
from ...mesh import Mesh
from ...plan import ResolvedPlan
from ..inputs import PatchForward
from .arrivals import Arrivals
from .attentions import Attentions, Caches
from .blocks import SpreadModel
from .call import Call, StageOver
from .compiled import OVERRIDE, CompiledBlocks
from .declaration import Pictured
from .forward import Forward
from .picture import Picture, by
from .placement import Placement
from .token_layout import TokenLayout

if TYPE_CHECKING:
    from ...weights.stores.holding import Holding  # which imports what only workers need

Compute = Callable[[Tensor, Mapping[str, Any]], Tensor]
"""The model's forward, given a latent and transformer_options."""


class SpreadForward:
    """Runs this rank's blocks of a model.

    Args:
        holding: how this rank holds the weights of its blocks.
        mark: called after each block, so that a watcher sees that the rank gets on.
        compiled: runs the blocks, if they are to be compiled.
    """

    def __init__(
        self,
        model: SpreadModel,
        mesh: Mesh,
        plan: ResolvedPlan,
        holding: Holding,
        mark: Callable[[], None],
        compiled: CompiledBlocks | None = None,
    ) -> None:
        self._model = model
        self._mesh = mesh
        self._plan = plan
        self._holding = holding
        self._mark = mark
        self._caches: dict[Hashable, Caches] = {}
        self._places: dict[tuple[Picture, int | None], TokenLayout] = {}
        self._kept: dict[Hashable, dict[Hashable, Any]] = {}
        self._modulations: dict[Hashable, dict[Hashable, Any]] = {}
        self._compiled = compiled
        self._arrivals = Arrivals(mesh)
        self.gathers = 0
        """How often the last forward gathered a stream."""

    @property
    def cache_bytes(self) -> int:
        """Bytes of keys and values kept."""
        return sum(caches.nbytes for caches in self._caches.values())

    def uncompiled(self) -> tuple[str, ...]:
        """Of kinds of blocks that could not be compiled, why not; each is told once."""
        return () if self._compiled is None else self._compiled.told()

    def run(
        self,
        key: Hashable,
        picture: Picture,
        shape: Sequence[int],
        latent: Tensor | None,
        dtype: torch.dtype,
        device: torch.device,
        patch: int | None,
        compute: Compute,
        behind: PatchForward | None = None,
    ) -> Tensor | None:
        """On the last stage the output for the whole latent, or for the patch; None on the others.

        Args:
            key: tells forwards apart whose prompts differ, and so what is kept of them.
            picture: the latent's tokens.
            shape: the latent's; not the picture's where sound is packed with it.
            latent: in the compute dtype, on the first stage.
            patch: the number of the patch to compute from the cache, or None for everything, exactly.
            behind: the patch's forward that comes behind this one, if it is known to come.

        Raises:
            Refused: the model's output is of another size than the latent.
        """
        count = self._plan.patches
        call = Call(self._mesh.sequence, self._places_of(picture, patch), device)
        caches = None
        if count > 1:
            if patch is None:
                self._caches[key] = Caches()
            caches = self._caches[key]
        if latent is None:  # the other stages know its shape only; what they would compute of it by mistake is NaN
            latent = torch.full(tuple(shape), torch.nan, dtype=dtype, device=device)
        attentions = Attentions(call, self._mesh, self._plan.attention, caches)
        kept = self._kept.setdefault((key, picture), {})
        modulations = self._modulations_of(key, patch)
        self._model.running = Forward(
            call, attentions, self._mesh, self._arrivals, self._holding, self._mark, kept, modulations, self._compiled
        )
        self._arrivals.enter(None if patch is None else PatchForward(key, patch), behind)
        try:
            with self._holding.forward():
                out = compute(latent, {OVERRIDE: attentions})
        except StageOver:
            return None
        finally:
            self._model.running = None
            self.gathers = call.gathers
            call.given = {}  # the options in it lead back here: what a step made would stay until garbage is collected
        if not picture.whole and out.shape[2:] != latent.shape[2:]:  # it was padded and is not cropped: Kandinsky 5
            raise Refused(
                f"the model gives {by(out.shape[2:])} for a latent of {by(latent.shape[2:])}, because {picture.not_whole()}"
            )
        return out if patch is None else picture.regions(count)[patch].of(out)

    def picture_tokens(self, picture: Picture, references: int) -> Placement:
        """Where the picture's tokens are in a stream of them with so many tokens of references behind."""
        whole = self._places_of(picture, None).of(picture.tokens + references, Pictured())
        return whole.part(0, picture.tokens)

    def _modulations_of(self, key: Hashable, patch: int | None) -> dict[Hashable, Any] | None:
        """What the patches of one model call share, which the first of them makes."""
        if patch is None:
            return None
        if patch == 0:
            self._modulations[key] = {}
        return self._modulations[key]

    def _places_of(self, picture: Picture, patch: int | None) -> TokenLayout:
        if (picture, patch) not in self._places:
            self._places[picture, patch] = TokenLayout(self._plan.shares, picture, self._plan.patches, patch)
        return self._places[picture, patch]
