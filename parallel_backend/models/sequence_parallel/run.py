"""The forward of a ComfyUI model on one rank: its pipeline stage, for the whole sequence or for one patch."""

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
    """A forward that runs this rank's blocks of a model.

    Args:
        compiled: runs the blocks, if they are to be compiled.

    Attributes:
        override: an attention override, which computes attention in place of the kernels, or None.
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
        """The number of times that the last forward gathered a stream."""

    @property
    def cache_bytes(self) -> int:
        """Return the bytes of the keys and values that are cached."""
        return sum(caches.nbytes for caches in self._caches.values())

    def uncompiled(self) -> tuple[str, ...]:
        """Return a sentence for each kind of block that could not be compiled. Each sentence is returned only once."""
        return () if self._compiled is None else self._compiled.warnings()

    def compiling(self) -> float:
        """Return the seconds spent on compiling blocks since the last call of this method."""
        return 0.0 if self._compiled is None else self._compiled.seconds()

    def run(
        self, inputs: Inputs, picture: Picture, latent: Tensor | None, patch: int | None, compute: Compute
    ) -> Tensor | None:
        """Run this stage. Return the output for the whole latent or for the patch, or None if the stage is not the last.

        Args:
            picture: the latent's tokens. Its shape differs from the latent's if sound is packed with the latent.
            latent: the latent in the compute dtype on the first and the last stage; None on the stages between.
            patch: the number of the patch to compute with cached keys and values. None: compute the whole latent, exactly.
            compute: runs the model's forward.

        Raises:
            Refused: the model's output has another size than the latent.
        """
        key, count = inputs.key, self._plan.patches
        call = CallLayout(self._mesh.sequence, self._layout_of(picture, patch), inputs.device)
        caches = None
        if count > 1:
            if patch is None:
                self._caches[key] = Caches()
            caches = self._caches[key]
        if latent is None:  # stages between know only the shape; NaN shows any use of the values by mistake
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
        if not picture.whole and out.shape[2:] != latent.shape[2:]:  # padded and not cropped, as by Kandinsky 5
            raise Refused(
                f"the model gives {by(out.shape[2:])} for a latent of {by(latent.shape[2:])}, because {picture.not_whole()}"
            )
        return out if patch is None else picture.regions(count)[patch].of(out)

    def tokens_of(self, picture: Picture, references: int) -> Placement:
        """Return the placement of the latent's tokens in a stream that ends with `references` tokens of references."""
        whole = self._layout_of(picture, None).of(picture.tokens + references, LatentTokens())
        return whole.part(0, picture.tokens)

    def _modulations_of(self, key: Hashable, patch: int | None) -> dict[Hashable, Any] | None:
        """Return the modulations that all patches of one model call share. The first patch computes them."""
        if patch is None:
            return None
        if patch == 0:
            self._modulations[key] = {}
        return self._modulations[key]

    def _layout_of(self, picture: Picture, patch: int | None) -> TokenLayout:
        if (picture, patch) not in self._layouts:
            self._layouts[picture, patch] = TokenLayout(self._plan.shares, picture, self._plan.patches, patch)
        return self._layouts[picture, patch]
