"""From a latent and sigma to the denoised latent: which prompts take part, their average, and CFG.

The arithmetic is ComfyUI's: entries of one CONDITIONING are averaged by strength, and CFG combines denoised latents.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from ..models.family import Conditioning
from ..wire.messages import Prompt

Forward = Callable[[Tensor, Tensor, Conditioning], Tensor]


class Guidance:
    """Denoises with a positive and, unless it is None, a negative list of prompts.

    Args:
        forward: the model.
        dtype: the compute dtype.
        timestep_scale: turns sigma into the model's timestep.
        cfg: the guidance scale; used only with a negative.
        positive, negative: prompts whose tensors are looked up in `tensors`.
    """

    def __init__(
        self,
        forward: Forward,
        dtype: torch.dtype,
        timestep_scale: float,
        cfg: float,
        positive: Sequence[Prompt],
        negative: Sequence[Prompt] | None,
        tensors: Mapping[str, Tensor],
    ) -> None:
        self._forward = forward
        self._dtype = dtype
        self._timestep_scale = timestep_scale
        self._cfg = cfg
        self._sides = [positive] if negative is None else [positive, negative]
        self._tensors = {name: tensor.to(dtype) for name, tensor in tensors.items()}

    def __call__(self, x: Tensor, sigma: Tensor) -> Tensor:
        """The denoised latent, `[batch, channels, ...]` fp32 like `x`."""
        taking_part = [
            (side, prompt)
            for side, prompts in enumerate(self._sides)
            for prompt in prompts
            if (prompt.start is None or sigma <= prompt.start) and (prompt.end is None or sigma >= prompt.end)
        ]
        sums = [torch.zeros_like(x) for _ in self._sides]
        weights = [1e-37 for _ in self._sides]
        for batch in self._batches([prompt for _, prompt in taking_part]):
            denoised = self._denoise(x, sigma, [taking_part[index][1] for index in batch])
            for index, part in zip(batch, denoised, strict=True):
                side, prompt = taking_part[index]
                sums[side] += part * prompt.strength
                weights[side] += prompt.strength
        averages = [total / weight for total, weight in zip(sums, weights, strict=True)]
        if len(averages) == 1:
            return averages[0]
        positive, negative = averages
        return negative + (positive - negative) * self._cfg

    def _batches(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        """Indices of prompts whose tensors have the same shapes: those run as one forward."""
        batches: dict[object, list[int]] = {}
        for index, prompt in enumerate(prompts):
            shapes = tuple(sorted((name, self._tensors[key].shape[1:]) for name, key in prompt.tensors.items()))
            batches.setdefault(shapes, []).append(index)
        return list(batches.values())

    def _denoise(self, x: Tensor, sigma: Tensor, prompts: Sequence[Prompt]) -> Sequence[Tensor]:
        count, size = len(prompts), x.shape[0]
        conditioning = {
            name: torch.cat([_repeat(self._tensors[prompt.tensors[name]], size) for prompt in prompts])
            for name in prompts[0].tensors
        }
        timestep = (sigma * self._timestep_scale).to(x.device).expand(count * size)
        latent = x.to(self._dtype).repeat(count, *[1] * (x.ndim - 1))
        velocity = self._forward(latent, timestep, conditioning).float()
        return [x - part * sigma for part in velocity.chunk(count)]


def _repeat(tensor: Tensor, batch: int) -> Tensor:
    """The tensor with its batch repeated or cut to `batch`, as ComfyUI spreads conditioning over a batch."""
    if tensor.shape[0] < batch:
        tensor = tensor.repeat(-(-batch // tensor.shape[0]), *[1] * (tensor.ndim - 1))
    return tensor[:batch]
