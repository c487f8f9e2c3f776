"""A model call on one rank: the latent as the model sees it, a forward for each batch of prompts, and what a cache spares."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ..comm.meter import Meter
from ..models.inputs import Inputs, PatchForward
from ..weights.stores.store import BlockAccess
from .guidance import NOTHING, Guidance
from .process import NoiseProcess
from .prompts import Batch, Prompts
from .replay import Prediction
from .step_cache import StepCache

Behind = Callable[[Batch], PatchForward | None]
"""The forward that comes behind that of a batch, where it is of the same patches."""


class RunsStage(Protocol):
    """One rank's part of a forward."""

    def __call__(self, inputs: Inputs, latent: Tensor | None, patch: int | None) -> Tensor | None:
        """On the last stage the output for the whole latent, or for the patch; None on the others.

        Args:
            latent: the whole latent in the compute dtype, on the first and the last stage.
            patch: the number of the patch to compute from the cache, or None for everything, exactly.
        """


def no_next_forward(batch: Batch) -> None:
    """Return None: no forward follows one of a whole latent."""


@dataclass(frozen=True)
class ModelCalls:
    """What all model calls of a denoise have in common."""

    forward: RunsStage
    """This rank's stage."""
    access: BlockAccess
    """How the weights of its blocks are made usable."""
    prompts: Prompts
    """The prompts that this rank computes."""
    guidance: Guidance
    """How their outputs combine."""
    process: NoiseProcess
    """How the latent and sigma become the model's input and time."""
    sigmas: Tensor
    """The sigmas of all steps, fp32 on the CPU."""
    cache: StepCache
    """What may save calls, where there is one stage and one patch."""
    dtype: torch.dtype
    """That of the computation."""
    meter: Meter
    """Records what is computed when, if a trace was asked for."""

    def outputs(
        self,
        number: int,
        batches: Sequence[Batch],
        x: Tensor,
        sigma: Tensor,
        timestep: Tensor,
        *,
        reads_latent: bool = True,
        patch: int | None = None,
        next_forward: Behind = no_next_forward,
    ) -> list[Tensor | None]:
        """The output of each batch on the last stage, None on the others.

        Args:
            number: the call's, from 0.
            x: the sampler's latent, fp32.
            sigma: 0-dim fp32 on the CPU.
            timestep: 0-dim, on the device.
            reads_latent: whether this stage gives the latent to the model, as the first and the last do.
            patch: the number of the patch to compute from the cache, or None for everything, exactly.
        """
        latent = self.process.model_input(x, sigma).to(self.dtype) if reads_latent else None

        def forward(batch: Batch) -> Tensor | None:
            inputs = batch.inputs(x, timestep, self.dtype, (sigma[None], self.sigmas), next_forward(batch))
            return self.forward(inputs, None if latent is None else batch.stack(latent), patch)

        def run(batches: Sequence[Batch]) -> list[Tensor | None]:
            with self.access.model_call(len(batches)):
                return [forward(batch) for batch in batches]

        with self.meter.span("stage", call=number, patch=-1 if patch is None else patch):
            return self.cache.outputs(sigma, x, latent, batches, run)

    def answer(self, x: Tensor, sigma: Tensor, batches: Sequence[Batch], outputs: Sequence[Tensor]) -> Prediction:
        """What the batches' outputs, for the whole latent or for a patch `x` of it, say of the clean latent."""
        branches: list[Tensor] = []

        def combine(moved: Mapping[int, Tensor] = NOTHING) -> Tensor:
            branches.extend(self.guidance.averages(x, sigma, batches, outputs, moved))
            return self.guidance.combined(x, branches)

        denoised = self.cache.denoised(sigma, x, combine)
        return Prediction(denoised, branches)
