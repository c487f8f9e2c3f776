"""The steps from the model's outputs to the denoised latent: the average over prompts and classifier-free guidance (CFG).

The arithmetic is ComfyUI's: entries of one CONDITIONING are averaged by strength, and CFG combines denoised latents. With
cfg degree 2 each rank computes one branch, and ranks exchange the averages.
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
"""A function that changes the denoised latent, as ComfyUI's post-CFG functions do.

Its dict has some of their arguments, by ComfyUI's names; see `Guidance.combined`.
"""


class Guidance:
    """The combination of the outputs of one model call into a denoised latent.

    Args:
        process: converts the model's outputs to denoised latents.
        cfg: the guidance scale, for two branches. `functions` get it in any case.
        branches: the branches that this rank computes.
        axis: the ranks that compute the other branches.
        functions: functions that follow the guidance. Each treats every latent of a batch separately.
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
        """Return the denoised latent after guidance.

        Args:
            x: the noisy latent, fp32 `[batch, channels, ...]`.
            averages: each branch's denoised latent, shaped as x: the positive, and the negative if there is one.

        Returns:
            The denoised latent, fp32, shaped as x.
        """
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
        """Average the denoised latents of each branch's prompts by strength. A collective of the ranks of `axis`.

        Args:
            x: the noisy latent, fp32 `[batch, channels, ...]`.
            sigma: the noise level of x.
            batches: the batches of prompts that this rank computed.
            outputs: the model's output for each batch, `[prompts * batch, channels, ...]`.
            moved: by the number of a prompt, the latent that its output belongs to, in place of x.

        Returns:
            One fp32 latent per branch, shaped as x: the positive, and the negative if there is one.
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
