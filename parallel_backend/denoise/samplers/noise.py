"""Random numbers for samplers: drawn for the whole latent, of which each sampler gets its part.

Patches of one latent, and ranks that hold different patches, must see the same noise as a run on the whole.
So every source draws the whole latent from the seed; who draws, and who gets what of it, is the share's business.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
import torchsde
from torch import Tensor

NoiseSource = Callable[[Tensor, Tensor], Tensor]
"""Standard normal noise for the step from one sigma to the next (0-dim fp32): fp32, shaped like the sampler's latent."""

Draw = Callable[[], Tensor]
"""Draws noise of the whole latent, fp32 on its device."""

Share = Callable[[Draw], Tensor]
"""What a sampler gets of a draw. It need not call it: another rank may have drawn for all."""


def whole(draw: Draw) -> Tensor:
    """The share of a sampler that runs alone, on the whole latent."""
    return draw()


@dataclass(frozen=True)
class LatentNoise:
    """Makes the noise source a sampler needs.

    `shape` and `device` are those of the **whole** latent, batch included, also where the sampler runs on
    one patch; `share` gives that patch its part. Each call of a method starts the sequence anew, so
    every patch's sampler gets its own source and all agree.
    """

    shape: tuple[int, ...]
    device: torch.device
    seed: int
    share: Share = whole

    def gaussian(self, *, clip_std: float = 0.0) -> NoiseSource:
        """Independent noise at every call, whatever the sigmas.

        Seeded as ComfyUI does: the seed itself on an accelerator, the seed + 1 on the CPU, where the seed
        itself made the initial noise. `clip_std` > 0 clamps each draw to that many of its own standard
        deviations.
        """
        generator = torch.Generator(self.device)
        generator.manual_seed(self.seed + 1 if self.device.type == "cpu" else self.seed)

        def draw() -> Tensor:
            drawn = torch.randn(self.shape, dtype=torch.float32, device=self.device, generator=generator)
            if clip_std > 0:
                limit = clip_std * drawn.std()
                drawn = drawn.clamp(-limit, limit)
            return drawn

        return lambda _sigma, _sigma_next: self.share(draw)

    def brownian(self, sigmas: Tensor, *, on_cpu: bool = True) -> NoiseSource:
        """Increments of one Brownian path over the schedule `sigmas`, scaled to unit variance.

        A schedule with other steps over the same range follows the same path. It is drawn on the CPU, or on
        the latent's device, which gives other numbers on an accelerator.
        """
        low, high = sigmas[sigmas > 0].min(), sigmas.max()

        @cache
        def path() -> torchsde.BrownianTree:
            origin = torch.zeros(self.shape, dtype=torch.float32, device="cpu" if on_cpu else self.device)
            return torchsde.BrownianTree(low, origin, high, entropy=self.seed)

        def draw(sigma: Tensor, sigma_next: Tensor) -> Tensor:
            # The path is parametrised upwards in sigma; samplers walk it downwards.
            start, end, sign = (sigma, sigma_next, 1) if sigma < sigma_next else (sigma_next, sigma, -1)
            increment = self.share(lambda: path()(start, end).to(self.device))
            return increment * sign / (end - start).sqrt()

        return draw
