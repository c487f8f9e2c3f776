"""Random numbers for samplers: drawn for the whole latent, seen through a view.

Patches of one latent, and ranks that hold different patches, must see the same noise as a run on the whole.
So every source draws the whole latent from the seed and returns a slice of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torchsde
from torch import Tensor

NoiseSource = Callable[[Tensor, Tensor], Tensor]
"""Standard normal noise for the step from one sigma to the next (0-dim fp32): fp32, shaped like the view."""


def whole(drawn: Tensor) -> Tensor:
    """The view of a sampler that runs on the whole latent."""
    return drawn


@dataclass(frozen=True)
class LatentNoise:
    """Makes the noise source a sampler needs.

    `shape` and `device` are those of the **whole** latent, batch included, also where the sampler runs on
    one patch; `view` takes what was drawn to that patch. Each call of a method starts the sequence anew, so
    every patch's sampler gets its own source and all agree.
    """

    shape: tuple[int, ...]
    device: torch.device
    seed: int
    view: Callable[[Tensor], Tensor] = whole

    def gaussian(self, *, clip_std: float = 0.0) -> NoiseSource:
        """Independent noise at every call, whatever the sigmas.

        Seeded as ComfyUI does: the seed itself on an accelerator, the seed + 1 on the CPU, where the seed
        itself made the initial noise. `clip_std` > 0 clamps each draw to that many of its own standard
        deviations.
        """
        generator = torch.Generator(self.device)
        generator.manual_seed(self.seed + 1 if self.device.type == "cpu" else self.seed)

        def draw(_sigma: Tensor, _sigma_next: Tensor) -> Tensor:
            drawn = torch.randn(self.shape, dtype=torch.float32, device=self.device, generator=generator)
            if clip_std > 0:
                limit = clip_std * drawn.std()
                drawn = drawn.clamp(-limit, limit)
            return self.view(drawn)

        return draw

    def brownian(self, sigmas: Tensor, *, on_cpu: bool = True) -> NoiseSource:
        """Increments of one Brownian path over the schedule `sigmas`, scaled to unit variance.

        A schedule with other steps over the same range follows the same path. It is drawn on the CPU, or on
        the latent's device, which gives other numbers on an accelerator.
        """
        low, high = sigmas[sigmas > 0].min(), sigmas.max()
        origin = torch.zeros(self.shape, dtype=torch.float32, device="cpu" if on_cpu else self.device)
        path = torchsde.BrownianTree(low, origin, high, entropy=self.seed)

        def draw(sigma: Tensor, sigma_next: Tensor) -> Tensor:
            # The path is parametrised upwards in sigma; samplers walk it downwards.
            start, end, sign = (sigma, sigma_next, 1) if sigma < sigma_next else (sigma_next, sigma, -1)
            increment = self.view(path(start, end)).to(self.device)
            return increment * sign / (end - start).sqrt()

        return draw
