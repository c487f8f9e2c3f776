"""A model call on one rank: a forward for each batch of prompts, unless a step cache answers it, and the prediction."""

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
"""A function of a batch that returns the patch forward after the batch's own; None if the next forward is not of a patch."""


class RunsStage(Protocol):
    """One rank's part of a forward."""

    def __call__(self, inputs: Inputs, latent: Tensor | None, patch: int | None) -> Tensor | None:
        """Run this rank's stage.

        Args:
            inputs: the model's inputs besides the latent.
            latent: the whole latent in the compute dtype; None on stages between the first and the last.
            patch: the number of the patch to compute with cached keys and values, or None to compute all tokens exactly.

        Returns:
            On the last stage the output for the whole latent or for the patch; None on the other stages.
        """


def no_next_forward(batch: Batch) -> None:
    """Return None: no patch forward follows a forward of a whole latent."""


@dataclass(frozen=True)
class ModelCalls:
    """The settings that all model calls of a denoise share, and the calls themselves."""

    forward: RunsStage
    """The forward of this rank's stage."""
    access: BlockAccess
    """The access that makes the weights of the stage's blocks usable during a call."""
    prompts: Prompts
    """The prompts that this rank computes."""
    guidance: Guidance
    """The combination of the prompts' outputs."""
    process: NoiseProcess
    """The conversion of the latent and sigma to the model's input and timestep."""
    sigmas: Tensor
    """The sigmas of all steps, fp32 on the CPU."""
    cache: StepCache
    """The step cache, which may skip calls if there is one stage and one patch."""
    dtype: torch.dtype
    """The compute dtype."""
    meter: Meter
    """The meter, which records a span per call if the user asked for a trace."""

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
        """Run the forwards of one model call on this rank's stage.

        Args:
            number: the call's number, from 0.
            batches: the batches of prompts to compute.
            x: the sampler's latent, fp32.
            sigma: 0-dim fp32 on the CPU.
            timestep: 0-dim, on the device.
            reads_latent: True if this stage passes the latent to the model, as the first and the last stage do.
            patch: the number of the patch to compute with cached keys and values, or None to compute all tokens exactly.
            next_forward: returns the patch forward after a batch's own.

        Returns:
            The output of each batch on the last stage, None for each on the other stages. Empty if LazyCache skipped the call.
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
        """Return the prediction of the clean latent from the outputs of a call.

        Args:
            x: the noisy latent or a patch of it, fp32.
            sigma: the noise level of x.
            batches: the batches of the call.
            outputs: the output of each batch for x.
        """
        branches: list[Tensor] = []

        def combine(moved: Mapping[int, Tensor] = NOTHING) -> Tensor:
            branches.extend(self.guidance.averages(x, sigma, batches, outputs, moved))
            return self.guidance.combined(x, branches)

        denoised = self.cache.denoised(sigma, x, combine)
        return Prediction(denoised, branches)
