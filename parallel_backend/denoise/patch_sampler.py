"""The sampler of one patch: a program that is replayed on the patch of the latent, with inpainting around the model."""

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
    """Inpainting: outside the mask the latent follows the original, as in ComfyUI's KSamplerX0Inpaint.

    Attributes:
        process: adds noise to the original.
        mask: 1 where the latent may change. Mask, latent and noise broadcast to the patch's `[batch, channels, ...]`.
        latent: the clean original.
        noise: the noise of the original.
        clean: the model sees the original without noise outside the mask.
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
        """Return the inpainting of a patch, from a request's tensors; None if there is no mask.

        Args:
            tensors: the request's tensors.
            process: the noise process.
            view: returns the patch's part of a tensor.
            clean: as the attribute.
        """
        if "mask" not in tensors:
            return None
        mask, latent, noise = (view(tensors[name]) for name in ("mask", "latent", "noise"))
        return cls(process, mask, latent, noise, clean)

    def before(self, x: Tensor, sigma: Tensor) -> Tensor:
        """Return the model's input: `x` inside the mask, the original outside."""
        outside = self.latent if self.clean else self.process.add_noise(sigma, self.noise, self.latent)
        return x * self.mask + outside * (1.0 - self.mask)

    def after(self, denoised: Tensor) -> Tensor:
        """Return the sampler's denoised latent: `denoised` inside the mask, the original outside."""
        return denoised * self.mask + self.latent * (1.0 - self.mask)


class StepLatents(NamedTuple):
    """A step event of a sampler, with its latents."""

    step: int
    denoised: Tensor
    x: Tensor


class PatchSampler:
    """A running program, which advances from one model call to the next.

    Args:
        script: the program.
        x: the noisy latent or a patch of it, fp32.
        noise: the source of fresh noise.
        inpaint: the inpainting around the model; None without a mask.

    Attributes:
        result: the final latent; None until the program has ended.
    """

    def __init__(self, script: DeviceProgram, x: Tensor, noise: LatentNoise, inpaint: Inpaint | None) -> None:
        self._steps: Steps = script.replay(x, noise, lambda *event: self._events.append(StepLatents(*event)))
        self._inpaint = inpaint
        self._events: list[StepLatents] = []
        self._call: ModelRequest | None = None
        self.result: Tensor | None = None
        self._step(lambda: next(self._steps))

    @property
    def model_input(self) -> Tensor:
        """Return the latent that the model sees in the pending call."""
        assert self._call is not None
        call = self._call
        return self._inpaint.before(call.x, call.sigma) if self._inpaint else call.x

    def advance(self, answer: Prediction) -> None:
        """Answer the pending call with a prediction, and run the program to its next call or to its end."""
        denoised, branches = answer
        answer = Prediction(self._inpaint.after(denoised) if self._inpaint else denoised, branches)
        self._step(lambda: self._steps.send(answer))

    def take_events(self) -> list[StepLatents]:
        """Return the step events since the last call of this method, and forget them."""
        events, self._events = self._events, []
        return events

    def _step(self, resume: Callable[[], ModelRequest]) -> None:
        try:
            self._call = resume()
        except StopIteration as end:
            self._call, self.result = None, end.value
