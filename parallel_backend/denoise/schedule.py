"""All model calls of a denoise, known beforehand: samplers choose them by the sigmas alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from .samplers import Steps


class Call(NamedTuple):
    """One model call: its sigma (0-dim fp32 on the CPU), its step, and whether it is the step's first."""

    sigma: torch.Tensor
    step: int
    opens_step: bool


def schedule(start: Callable[[torch.Tensor], Steps]) -> list[Call]:
    """The calls of a sampler, found by running it on a latent without elements.

    Args:
        start: makes the sampler for a latent.
    """
    nothing = torch.empty(0)
    calls: list[Call] = []
    steps = start(nothing)
    try:
        call = next(steps)
        while True:
            step = calls[-1].step if call.step is None else call.step
            calls.append(Call(call.sigma, step, call.step is not None))
            call = steps.send(nothing)
    except StopIteration:
        return calls
