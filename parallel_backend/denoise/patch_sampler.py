"""The sampler of one patch: a program, replayed on that patch's part of the latent, with inpainting around the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from .noise import LatentNoise
from .process import NoiseProcess
from .replay import DeviceProgram, ModelRequest, Prediction, Steps


@dataclass(frozen=True)
class Inpaint:
    """Outside the mask the latent follows the original, as ComfyUI's KSamplerX0Inpaint does it.

    `mask` is 1 where the latent may change, `latent` the clean original, `noise` what it was noised with; all broadcast to
    the patch's `[batch, channels, ...]`. With `clean` what is outside the mask is shown to the model without noise.
    """

    process: NoiseProcess
    mask: Tensor
    latent: Tensor
    noise: Tensor
    clean: bool

    @classmethod
    def of(
        cls, tensors: Mapping[str, Tensor], process: NoiseProcess, view: Callable[[Tensor], Tensor], clean: bool
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


class Shown(NamedTuple):
    """What a sampler shows of a step."""

    step: int
    denoised: Tensor
    x: Tensor


class PatchSampler:
    """Drives a program from one model call to the next.

    Args:
        x: the noisy latent or a patch of it, fp32; `noise` is where its fresh noise comes from.
        inpaint: what stands around the model, if there is a mask.
    """

    def __init__(self, script: DeviceProgram, x: Tensor, noise: LatentNoise, inpaint: Inpaint | None) -> None:
        self._steps: Steps = script.replay(x, noise, lambda *event: self._events.append(Shown(*event)))
        self._inpaint = inpaint
        self._events: list[Shown] = []
        self._call: ModelRequest | None = None
        self.result: Tensor | None = None
        self._step(lambda: next(self._steps))

    @property
    def model_input(self) -> Tensor:
        """The latent that the model is to see in the call that is waiting."""
        assert self._call is not None
        call = self._call
        return self._inpaint.before(call.x, call.sigma) if self._inpaint else call.x

    def advance(self, answer: Prediction) -> None:
        """Answer the waiting call with what the guidance made of the model's outputs, and with the sides."""
        denoised, branches = answer
        answer = Prediction(self._inpaint.after(denoised) if self._inpaint else denoised, branches)
        self._step(lambda: self._steps.send(answer))

    def take_events(self) -> list[Shown]:
        """Return the step events since the last call, and forget them."""
        events, self._events = self._events, []
        return events

    def _step(self, resume: Callable[[], ModelRequest]) -> None:
        try:
            self._call = resume()
        except StopIteration as end:
            self._call, self.result = None, end.value
