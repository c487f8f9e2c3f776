"""Fresh noise for samplers, drawn for the whole latent and cut to the part of a patch.

Patches of one latent, on one rank or several, must see the same noise as a run on the whole latent. So every source draws
noise of the whole latent from the seed. The share decides which rank draws, and which part each sampler gets.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import torch
import torchsde
from torch import Tensor

from ..comm.communicator import Communicator
from ..errors import Refused
from ..mesh import Mesh
from ..models.inputs import Region
from .program import NoiseSource

Draw = Callable[[], Tensor]
"""A function that draws noise of the whole latent, fp32 on the latent's device."""

Share = Callable[[Draw], Tensor]
"""A function that returns a sampler's part of a draw. It need not call the draw: another rank may have drawn for all."""

Drawn = Callable[[float, float, float], Tensor]
"""A function of (start sigma, end sigma, clip) that returns standard normal noise for that step.

The noise is clamped to `clip` of its own standard deviations; 0 means no clamp.
"""


SHORT_STEP = 1e-5
"""Difference of sigmas below which torchsde may not tell them apart: it rounds them to 1e-6."""


def whole(draw: Draw) -> Tensor:
    """Return the whole draw: the share of a sampler that runs alone, on the whole latent."""
    return draw()


def check_step(source: NoiseSource, start: float, end: float) -> None:
    """Check that a source can draw noise for a step between two sigmas.

    In a run one rank draws for the others, so every rank checks beforehand and raises the same error. Only steps at which
    torchsde may fail are tried: a step that reaches beyond the path, or a very short step.

    Raises:
        Refused: torchsde does not find the step on the path, and recurs without end.
    """
    low, high = min(start, end), max(start, end)
    if source.kind != "brownian" or (source.low <= low and high <= source.high and high - low >= SHORT_STEP):
        return
    try:
        LatentNoise((1,), torch.device("cpu")).drawn_from(source)(start, end, 0.0)
    except RecursionError:
        raise Refused(
            f"the sampler needs noise from sigma {start:g} to {end:g}, but noise can only be drawn for steps of "
            f"{SHORT_STEP:g} or more between sigmas {source.low:g} and {source.high:g}: choose sigmas that differ by "
            f"{SHORT_STEP:g} or more, with a zero only at the end, or a sampler without sde in its name."
        ) from None


@dataclass(frozen=True)
class LatentNoise:
    """The noise of a program's sources, for one sampler.

    Attributes:
        shape: the shape of the **whole** latent, batch included, even if the sampler runs on one patch.
        device: the device of the latent.
        share: returns the part of a draw that belongs to the sampler's patch.
    """

    shape: tuple[int, ...]
    device: torch.device
    share: Share = whole

    def drawn_from(self, source: NoiseSource) -> Drawn:
        """Return a function that draws the same numbers as ComfyUI's noise sampler of this kind.

        Each call of this method starts the sequence from its beginning. So every patch's sampler has its own sequence, and all
        these sequences are equal.
        """
        fresh = self._gaussian(source.seed) if source.kind == "gaussian" else self._brownian(source)

        def drawn(start: float, end: float, clip: float) -> Tensor:
            def draw() -> Tensor:
                noise = fresh(start, end)
                if clip > 0:
                    limit = clip * noise.std()
                    noise = noise.clamp(min=-limit, max=limit)
                return noise

            return self.share(draw)

        return drawn

    def _gaussian(self, seed: int) -> Callable[[float, float], Tensor]:
        """Return a function that draws independent noise at every call.

        The generator has the seed on an accelerator and the seed + 1 on the CPU, where the seed itself made the initial noise.
        """
        generator = torch.Generator(self.device)
        generator.manual_seed(seed + 1 if self.device.type == "cpu" else seed)

        def draw(_start: float, _end: float) -> Tensor:
            return torch.randn(self.shape, dtype=torch.float32, device=self.device, generator=generator)

        return draw

    def _brownian(self, source: NoiseSource) -> Callable[[float, float], Tensor]:
        """Return a function that draws increments of one Brownian path, scaled to unit variance.

        The path depends on the seed and the range of sigmas, not on the steps.
        """

        @cache
        def path() -> torchsde.BrownianTree:
            origin = torch.zeros(self.shape, dtype=torch.float32, device="cpu" if source.on_cpu else self.device)
            return torchsde.BrownianTree(
                torch.tensor(source.low), origin, torch.tensor(source.high), entropy=source.seed
            )

        def draw(start: float, end: float) -> Tensor:
            # The path's time is sigma, upwards; samplers go downwards.
            low, high = torch.tensor(min(start, end)), torch.tensor(max(start, end))
            increment: Tensor = path()(low, high).to(self.device)
            return (increment if start < end else -increment) / (high - low).sqrt()

        return draw


KIND = "noise"
"""The name under which the meter counts this traffic."""


@dataclass(frozen=True)
class SharedNoise:
    """A share by which one rank of the last stage draws noise and sends the other ranks their parts.

    Attributes:
        mesh: this rank's communicators.
        shape: the shape of the whole latent.
        rows: the rows of the batch on each data rank.
        patch: the sampler's part of the latent.
    """

    mesh: Mesh
    shape: Sequence[int]
    rows: Sequence[slice]
    patch: Region

    def __call__(self, draw: Draw) -> Tensor:
        """Return this rank's rows of the patch of one draw. A collective of the ranks of the last stage."""
        mesh = self.mesh
        assert mesh.is_last_stage, "only the last stage runs samplers"
        parts = [self.patch.of(torch.empty(self.shape, device="meta")[rows]) for rows in self.rows]
        mine = parts[mesh.data.rank]
        noise: Tensor | None = None
        if mesh.replies_to_host:
            drawn = draw()
            noise = torch.cat([self.patch.of(drawn[rows]).flatten() for rows in self.rows])
        if mesh.cfg.rank == mesh.sequence.rank == 0:
            noise = mesh.data.scatter(noise, [part.numel() for part in parts], KIND)
        if mesh.sequence.rank == 0:
            noise = _to_all(mesh.cfg, noise, mine.numel(), KIND)
        return _to_all(mesh.sequence, noise, mine.numel(), KIND).view(mine.shape)


def _to_all(axis: Communicator, noise: Tensor | None, count: int, kind: str) -> Tensor:
    """Return rank 0's tensor of `count` elements on every rank of an axis. A collective."""
    return axis.scatter(None if noise is None else noise.repeat(axis.size), [count] * axis.size, kind)
