"""From the model's outputs to the denoised latent: the prompts' average and classifier-free guidance.

The arithmetic is ComfyUI's: entries of one CONDITIONING are averaged by strength, and CFG combines denoised latents. With
cfg degree 2 each rank computes one side, and the sides' averages are exchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor

from ..comm.communicator import Communicator
from .process import NoiseProcess
from .prompts import Batch

NOTHING: Mapping[int, Tensor] = MappingProxyType({})


GuidanceFunction = Callable[[Mapping[str, object]], Tensor]
"""Changes the denoised latent, as ComfyUI's functions behind the guidance do: it is given what they are given, by their names."""


class Guidance:
    """Combines what the batches of one call predicted.

    Args:
        process: what the model's output says of the latent.
        cfg: the guidance scale; used only if there are two sides.
        sides: the sides that this rank computes.
        axis: the ranks that compute the other sides.
        functions: what follows the guidance; each treats every latent of a batch for itself.
    """

    def __init__(
        self,
        process: NoiseProcess,
        cfg: float,
        branches: Sequence[int],
        axis: Communicator,
        functions: Sequence[GuidanceFunction] = (),
    ) -> None:
        self._process = process
        self._cfg = cfg
        self._branches = branches
        self._axis = axis
        self._functions = functions

    def combined(self, x: Tensor, averages: Sequence[Tensor]) -> Tensor:
        """The denoised latent, fp32 like `x` `[batch, channels, ...]`: what the guidance makes of the sides."""
        positive, *negatives = averages
        denoised = negatives[0] + (positive - negatives[0]) * self._cfg if negatives else positive
        if not self._functions:
            return denoised
        negative = negatives[0] if negatives else torch.zeros_like(positive)
        for function in self._functions:
            denoised = function(
                {
                    "denoised": denoised,
                    "cond_denoised": positive,
                    "uncond_denoised": negative,
                    "cond_scale": self._cfg,
                    "input": x,
                }
            )
        return denoised

    def averages(
        self,
        x: Tensor,
        sigma: Tensor,
        batches: Sequence[Batch],
        outputs: Sequence[Tensor],
        moved: Mapping[int, Tensor] = NOTHING,
    ) -> list[Tensor]:
        """What each side's prompts say of the denoised latent, fp32 like `x`: the positive, and the negative if there is one.

        Args:
            outputs: the model's, for each batch, `[prompts * batch, channels, ...]`.
            moved: by the number of a prompt, what the output is taken from in place of `x`.
        """
        sums = {branch: torch.zeros_like(x) for branch in self._branches}
        weights = dict.fromkeys(self._branches, 1e-37)
        for batch, output in zip(batches, outputs, strict=True):
            parts = output.float().chunk(len(batch.members))
            for number, (branch, strength), part in zip(batch.key, batch.members, parts, strict=True):
                sums[branch] += self._process.denoised(moved.get(number, x), sigma, part) * strength
                weights[branch] += strength
        averages = [sums[branch] / weights[branch] for branch in self._branches]
        if self._axis.size > 1:
            count = averages[0].numel()
            both = self._axis.all_gather(averages[0].reshape(1, count, 1), [count] * self._axis.size)
            averages = [part.view_as(x) for part in both.chunk(self._axis.size, dim=1)]
        return averages
