"""Fresh noise for samplers: drawn for the whole latent; each patch gets its part.

Patches of one latent, and ranks that hold different patches, must see the same noise as a run on the whole.
So every source draws the whole latent from the seed; the share decides who draws and who gets which part.
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
"""Draws noise of the whole latent, fp32 on its device."""

Share = Callable[[Draw], Tensor]
"""What a sampler gets of a draw. It need not call it: another rank may have drawn for all."""

Drawn = Callable[[float, float, float], Tensor]
"""Standard normal noise for the step from one sigma to another, clamped to so many of its deviations (0: not at all)."""


SHORT_STEP = 1e-5
"""Steps between sigmas that torchsde may not tell from none: it rounds them to 1e-6."""


def whole(draw: Draw) -> Tensor:
    """The share of a sampler that runs alone, on the whole latent."""
    return draw()


def check_step(source: NoiseSource, start: float, end: float) -> None:
    """Try whether noise of a source can be drawn for a step between two sigmas.

    In a run one rank draws for the others, so all of them try it beforehand. Only what torchsde may fail at is tried: a step
    that reaches beyond the path, or a very short one.

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
            f"the sampler asks for noise from sigma {start:g} to {end:g}, which its path of noise from {source.low:g} to "
            f"{source.high:g} does not hold: choose sigmas that differ by {SHORT_STEP:g} or more, with a zero at the end only, "
            "or a sampler without sde in its name."
        ) from None


@dataclass(frozen=True)
class LatentNoise:
    """Makes the sources of a program's noise.

    `shape` and `device` are those of the **whole** latent, batch included, also where the sampler runs on
    one patch; `share` gives that patch its part. Each call begins the sequence anew, so
    every patch's sampler gets its own source and all agree.
    """

    shape: tuple[int, ...]
    device: torch.device
    share: Share = whole

    def drawn_from(self, source: NoiseSource) -> Drawn:
        """Noise of the numbers that ComfyUI's noise samplers of this kind give."""
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
        """Independent at every call: the seed itself on an accelerator, the seed + 1 on the CPU, where the seed itself made the
        initial noise."""
        generator = torch.Generator(self.device)
        generator.manual_seed(seed + 1 if self.device.type == "cpu" else seed)

        def draw(_start: float, _end: float) -> Tensor:
            return torch.randn(self.shape, dtype=torch.float32, device=self.device, generator=generator)

        return draw

    def _brownian(self, source: NoiseSource) -> Callable[[float, float], Tensor]:
        """Increments of one path, scaled to unit variance; other steps over the same range follow the same path."""

        @cache
        def path() -> torchsde.BrownianTree:
            origin = torch.zeros(self.shape, dtype=torch.float32, device="cpu" if source.on_cpu else self.device)
            return torchsde.BrownianTree(
                torch.tensor(source.low), origin, torch.tensor(source.high), entropy=source.seed
            )

        def draw(start: float, end: float) -> Tensor:
            # The path is parametrised upwards in sigma; samplers walk it downwards.
            low, high = torch.tensor(min(start, end)), torch.tensor(max(start, end))
            increment: Tensor = path()(low, high).to(self.device)
            return (increment if start < end else -increment) / (high - low).sqrt()

        return draw


KIND = "noise"
"""The name under which the meter counts this traffic."""


@dataclass(frozen=True)
class SharedNoise:
    """Gives the ranks of the last stage their part of what one of them draws. A collective of these ranks.

    `shape` is the whole latent's, `rows` are the runs of its batch, one a data rank, and `patch` is what a sampler holds.
    """

    mesh: Mesh
    shape: Sequence[int]
    rows: Sequence[slice]
    patch: Region

    def __call__(self, draw: Draw) -> Tensor:
        """This rank's rows of the patch, of one draw."""
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
    """Rank 0's tensor of `count` elements on every rank of an axis."""
    return axis.scatter(None if noise is None else noise.repeat(axis.size), [count] * axis.size, kind)
