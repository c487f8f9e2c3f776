"""The plain loop: a sampler's coroutine driven by a denoiser, whole latents at a time."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from .samplers import Steps

Denoise = Callable[[Tensor, Tensor], Tensor]


def run(
    steps: Steps,
    denoise: Denoise,
    before_step: Callable[[int], None],
    after_call: Callable[[int, Tensor, Tensor], None],
) -> Tensor:
    """Run a sampler to its end and return the final latent.

    Args:
        steps: the sampler's coroutine, not yet started.
        denoise: (x, sigma) -> denoised.
        before_step: called with each step's index before its first model call; may raise to stop the run.
        after_call: called after that call with the step's index, the denoised latent and x.
    """
    try:
        call = next(steps)
        while True:
            if call.step is not None:
                before_step(call.step)
            denoised = denoise(call.x, call.sigma)
            if call.step is not None:
                after_call(call.step, denoised, call.x)
            call = steps.send(denoised)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]
