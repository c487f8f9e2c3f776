"""The sampler of one patch: a coroutine over that patch's part of the latent, with inpainting around the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from .samplers import ModelCall, Process, Steps


@dataclass(frozen=True)
class Inpaint:
    """Outside the mask the latent follows the original, as ComfyUI's KSamplerX0Inpaint does it.

    `mask` is 1 where the latent may change, `latent` the clean original, `noise` what it was noised with; all broadcast to
    the patch's `[batch, channels, ...]`. With `clean` what is outside the mask is shown to the model without noise.
    """

    process: Process
    mask: Tensor
    latent: Tensor
    noise: Tensor
    clean: bool

    @classmethod
    def of(
        cls, tensors: Mapping[str, Tensor], process: Process, view: Callable[[Tensor], Tensor], clean: bool
    ) -> Inpaint | None:
        """For a patch, from a request's tensors; None if there is no mask."""
        if "mask" not in tensors:
            return None
        mask, latent, noise = (view(tensors[name]) for name in ("mask", "latent", "noise"))
        return cls(process, mask, latent, noise, clean)

    def before(self, x: Tensor, sigma: Tensor) -> Tensor:
        """What the model sees."""
        outside = self.latent if self.clean else self.process.add_noise(sigma, self.noise, self.latent)
        return x * self.mask + outside * (1.0 - self.mask)

    def after(self, denoised: Tensor) -> Tensor:
        """What the sampler is sent."""
        return denoised * self.mask + self.latent * (1.0 - self.mask)


class PatchSampler:
    """Drives a sampler's coroutine from one model call to the next.

    After `advance`, `x` and `denoised` are those of the call that was just answered.
    """

    def __init__(self, steps: Steps, inpaint: Inpaint | None) -> None:
        self._steps = steps
        self._inpaint = inpaint
        self._call: ModelCall | None = None
        self.result: Tensor | None = None
        self._step(lambda: next(steps))

    @property
    def model_input(self) -> Tensor:
        """The latent that the model is to see in the call that is waiting."""
        assert self._call is not None
        call = self._call
        return self._inpaint.before(call.x, call.sigma) if self._inpaint else call.x

    def advance(self, denoised: Tensor) -> None:
        """Answer the waiting call with what the guidance made of the model's outputs."""
        assert self._call is not None
        self.denoised = self._inpaint.after(denoised) if self._inpaint else denoised
        self.x = self._call.x
        self._step(lambda: self._steps.send(self.denoised))

    def _step(self, resume: Callable[[], ModelCall]) -> None:
        try:
            self._call = resume()
        except StopIteration as end:
            self._call, self.result = None, end.value
