"""A denoise whose sampler is a function that calls the model, as ComfyUI's own are: one stage, one patch.

The function runs on one rank, that which answers the host: what it draws and what it decides by values is drawn and decided
once. The other ranks follow. Before each model call they are told its sigma and sent their rows of the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import Cancelled
from ..layout import length
from ..mesh import Mesh
from ..models.region import Region
from ..transfers import sent_to
from .guidance import NOTHING, Guidance
from .model_calls import ModelCalls
from .shared_noise import SharedNoise

CALL, CANCEL, END = 0.0, 1.0, 2.0
"""What the leading rank tells the others: another model call, the user has cancelled, the sampler is done."""


class Answer(NamedTuple):
    """What one model call says of the clean latent, fp32 `[batch, channels, ...]`."""

    denoised: Tensor
    """What guidance made of the sides."""
    sides: Sequence[Tensor]
    """The positive, and the negative if there is one; none where a step cache answered in the guidance's place."""


Ask = Callable[[Tensor, Tensor, int], Answer]
"""A model call of the whole batch: its latent (fp32), its sigma (0-dim fp32 on the CPU), and the step it is of."""


class LedDenoise:
    """One run.

    Args:
        mesh: this rank's communicators.
        model: what the calls have in common.
        guidance: how the prompts' outputs combine.
        shape: the whole latent's; `rows` are the runs of its batch, one a data rank, and `whole` is all of a picture.
        cancelled: whether the user has cancelled; asked on the rank that leads.
        enter: told when a step begins, from 0.
    """

    def __init__(
        self,
        mesh: Mesh,
        model: ModelCalls,
        guidance: Guidance,
        shape: Sequence[int],
        rows: Sequence[slice],
        whole: Region,
        cancelled: Callable[[], bool],
        enter: Callable[[int], None],
    ) -> None:
        self._mesh = mesh
        self._model = model
        self._guidance = guidance
        self._rows = rows
        self._share = SharedNoise(mesh, shape, rows, whole, "latents")
        self._cancelled = cancelled
        self._enter = enter
        self._calls = 0
        self._step: int | None = None

    def run(self, sampler: Callable[[Ask], Tensor]) -> Tensor | None:
        """What `sampler` returns, on the rank that leads; None on the others. Raises Cancelled."""
        if self._mesh.reports:
            result = sampler(self._ask)
            self._told([END, 0.0, 0.0])
            return result
        while True:
            word, sigma, step = self._told(None)
            if word == END:
                return None
            self._obey(word)
            self._answer(None, torch.tensor(sigma), int(step))

    def _ask(self, x: Tensor, sigma: Tensor, step: int) -> Answer:
        word = CANCEL if self._cancelled() else CALL
        self._told([word, float(sigma), float(step)])
        self._obey(word)
        return self._answer(x, sigma, step)

    def _told(self, words: Sequence[float] | None) -> tuple[float, float, float]:
        """The leading rank's words on every rank: sigmas are fp32, so they arrive as they are."""
        everyone = self._mesh.stage
        sent = None if words is None else torch.tensor(words).repeat(everyone.size)
        word, sigma, step = everyone.scatter(sent, [3] * everyone.size, "control")[:3].tolist()
        return word, sigma, step

    @staticmethod
    def _obey(word: float) -> None:
        if word == CANCEL:
            raise Cancelled

    def _answer(self, latent: Tensor | None, sigma: Tensor, step: int) -> Answer:
        """A model call on every rank; the whole batch's answer where `latent`, the whole batch's, is given."""
        if step != self._step:
            self._step = step
            self._enter(step)

        def given() -> Tensor:
            assert latent is not None
            return latent

        x = self._share(given)
        batches = self._model.prompts.at(sigma)
        timestep = sent_to(self._model.process.timestep(sigma), x.device)
        outputs = self._model.outputs(self._calls, batches, x, sigma, timestep)
        self._calls += 1
        sides: list[Tensor] = []

        def guide(moved: Mapping[int, Tensor] = NOTHING) -> Tensor:
            sides.extend(self._guidance.sides(x, sigma, batches, [out for out in outputs if out is not None], moved))
            return self._guidance.combined(x, sides)

        denoised = self._model.cache.denoised(sigma, x, guide)
        if answers(self._mesh):
            denoised, *sides = (whole_batch(part, self._mesh, self._rows) for part in (denoised, *sides))
        return Answer(denoised, sides)


def answers(mesh: Mesh) -> bool:
    """Whether this rank's latents are those that are answered with, for its part of the batch."""
    return mesh.last and mesh.cfg.rank == 0 and mesh.sequence.rank == 0


def whole_batch(latent: Tensor, mesh: Mesh, rows: Sequence[slice]) -> Tensor:
    """All data ranks' latents, joined along the batch, of which each holds its run of `rows`. A collective over the data axis."""
    sizes = [length(run) for run in rows]
    joined = mesh.data.gather(latent.reshape(1, latent.shape[0], -1), sizes)
    return joined.view(sum(sizes), *latent.shape[1:])
