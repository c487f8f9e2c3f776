"""From velocities to the denoised latent: the prompts' average and classifier-free guidance.

The arithmetic is ComfyUI's: entries of one CONDITIONING are averaged by strength, and CFG combines denoised latents. With
cfg degree 2 each rank computes one side, and the sides' averages are exchanged.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..comm.communicator import Communicator
from .prompts import Batch


class Guidance:
    """Combines what the batches of one call predicted.

    Args:
        cfg: the guidance scale; used only if there are two sides.
        sides: the sides that this rank computes.
        axis: the ranks that compute the other sides.
    """

    def __init__(self, cfg: float, sides: Sequence[int], axis: Communicator) -> None:
        self._cfg = cfg
        self._sides = sides
        self._axis = axis

    def __call__(self, x: Tensor, sigma: Tensor, batches: Sequence[Batch], velocities: Sequence[Tensor]) -> Tensor:
        """The denoised latent, fp32 like `x` `[batch, channels, ...]`.

        Args:
            velocities: for each batch, `[prompts * batch, channels, ...]`.
        """
        sums = {side: torch.zeros_like(x) for side in self._sides}
        weights = dict.fromkeys(self._sides, 1e-37)
        for batch, velocity in zip(batches, velocities, strict=True):
            parts = velocity.float().chunk(len(batch.members))
            for (side, strength), part in zip(batch.members, parts, strict=True):
                sums[side] += (x - part * sigma) * strength
                weights[side] += strength
        averages = [sums[side] / weights[side] for side in self._sides]
        if self._axis.size > 1:
            count = averages[0].numel()
            both = self._axis.gather(averages[0].reshape(1, count, 1), [count] * self._axis.size)
            averages = [part.view_as(x) for part in both.chunk(self._axis.size, dim=1)]
        if len(averages) == 1:
            return averages[0]
        positive, negative = averages
        return negative + (positive - negative) * self._cfg
