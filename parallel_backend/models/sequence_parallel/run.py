"""One forward of a model of ComfyUI's on one rank: its stage, for the whole sequence or for one patch."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any

import torch
from torch import Tensor

from ...declaration import LatentTokens
from ...errors import Refused
from ..family import Execution
from ..inputs import Inputs, PatchForward
from .arrivals import Arrivals
from .attentions import Attentions, Caches
from .blocks import ParallelModel
from .call_layout import CallLayout, StageOver
from .compiled import OVERRIDE, CompiledBlocks
from .forward import RankForward
from .function_override import FunctionOverride, OfHeads
from .picture import Picture, by
from .placement import Placement
from .token_layout import TokenLayout

Compute = Callable[[Tensor, Mapping[str, Any]], Tensor]
"""The model's forward, given a latent and transformer_options."""


class ParallelForward:
    """Runs this rank's blocks of a model.

    Args:
        compiled: runs the blocks, if they are to be compiled.

    Attributes:
        override: answers attention in the kernels' place, if it is not None.
    """

    def __init__(self, model: ParallelModel, execution: Execution, compiled: CompiledBlocks | None = None) -> None:
        self._blocks = model
        self._mesh = execution.mesh
        self._plan = execution.plan
        self._access = execution.access
        self._on_progress = execution.on_progress
        self._caches: dict[Hashable, Caches] = {}
        self._layouts: dict[tuple[Picture, int | None], TokenLayout] = {}
        self._cached: dict[Hashable, dict[Hashable, Any]] = {}
        self._modulations: dict[Hashable, dict[Hashable, Any]] = {}
        self._compiled = compiled
        self._arrivals = Arrivals(execution.mesh)
        self.override: OfHeads | None = None
        self.gathers = 0
        """How often the last forward gathered a stream."""

    @property
    def cache_bytes(self) -> int:
        """Bytes of keys and values kept."""
        return sum(caches.nbytes for caches in self._caches.values())

    def uncompiled(self) -> tuple[str, ...]:
        """Of kinds of blocks that could not be compiled, why not; each is told once."""
        return () if self._compiled is None else self._compiled.warnings()

    def compiling(self) -> float:
        """Seconds that compiling blocks has taken since this was asked for last."""
        return 0.0 if self._compiled is None else self._compiled.seconds()

    def run(
        self, inputs: Inputs, picture: Picture, latent: Tensor | None, patch: int | None, compute: Compute
    ) -> Tensor | None:
        """On the last stage the output for the whole latent, or for the patch; None on the others.

        Args:
            picture: the latent's tokens; of another shape than the latent where sound is packed with it.
            latent: in the compute dtype, on the first and the last stage.
            patch: the number of the patch to compute from the cache, or None for everything, exactly.

        Raises:
            Refused: the model's output is of another size than the latent.
        """
        key, count = inputs.key, self._plan.patches
        call = CallLayout(self._mesh.sequence, self._layout_of(picture, patch), inputs.device)
        caches = None
        if count > 1:
            if patch is None:
                self._caches[key] = Caches()
            caches = self._caches[key]
        if latent is None:  # the stages between know its shape only; what they would compute of it by mistake is NaN
            latent = torch.full(tuple(inputs.shape), torch.nan, dtype=inputs.dtype, device=inputs.device)
        attentions = Attentions(call, self._mesh, self._plan, caches)
        if self.override is not None:
            attentions.overriding = FunctionOverride(self.override, call, self._mesh, self._plan)
        cached = self._cached.setdefault((key, picture), {})
        modulations = self._modulations_of(key, patch)
        self._blocks.running = RankForward(
            call,
            attentions,
            self._mesh,
            self._arrivals,
            self._access,
            self._on_progress,
            cached,
            modulations,
            self._compiled,
        )
        self._arrivals.enter(None if patch is None else PatchForward(key, patch), inputs.next_forward)
        try:
            with self._access.forward():
                out = compute(latent, {OVERRIDE: attentions})
        except StageOver:
            return None
        finally:
            self._blocks.running = None
            self.gathers = call.gathers
            call.end()
        if not picture.whole and out.shape[2:] != latent.shape[2:]:  # it was padded and is not cropped: Kandinsky 5
            raise Refused(
                f"the model gives {by(out.shape[2:])} for a latent of {by(latent.shape[2:])}, because {picture.not_whole()}"
            )
        return out if patch is None else picture.regions(count)[patch].of(out)

    def tokens_of(self, picture: Picture, references: int) -> Placement:
        """Where the picture's tokens are in a stream of them with so many tokens of references behind."""
        whole = self._layout_of(picture, None).of(picture.tokens + references, LatentTokens())
        return whole.part(0, picture.tokens)

    def _modulations_of(self, key: Hashable, patch: int | None) -> dict[Hashable, Any] | None:
        """What the patches of one model call share, which the first of them makes."""
        if patch is None:
            return None
        if patch == 0:
            self._modulations[key] = {}
        return self._modulations[key]

    def _layout_of(self, picture: Picture, patch: int | None) -> TokenLayout:
        if (picture, patch) not in self._layouts:
            self._layouts[picture, patch] = TokenLayout(self._plan.shares, picture, self._plan.patches, patch)
        return self._layouts[picture, patch]
