"""Which prompts take part in a model call, and which of them run as one forward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..conditioning import in_dict, runs_alone
from ..diffusion import PromptSpec, Value
from ..models.family import Conditioning
from ..models.inputs import Inputs, PatchForward

TEXT_MASK = "attention_mask"
"""The conditioning that says which text tokens there are."""


@dataclass(frozen=True)
class Batch:
    """Prompts that run as one forward, their latents stacked along the batch; `members` are (side, strength).

    `values` are what their conditioning holds besides tensors.
    """

    key: tuple[int, ...]
    members: tuple[tuple[int, float], ...]
    conditioning: Conditioning
    values: Mapping[str, Value]

    def inputs(
        self,
        latent: Tensor,
        timestep: Tensor,
        dtype: torch.dtype,
        sigmas: tuple[Tensor, Tensor],
        next_forward: PatchForward | None = None,
    ) -> Inputs:
        """What the model is given besides the latent `[batch, channels, ...]`.

        Args:
            timestep: 0-dim, on the latent's device.
            sigmas, behind: as the inputs'.
        """
        size = len(self.members) * latent.shape[0]
        shape = (size, *latent.shape[1:])
        times = timestep.expand(size)
        return Inputs(
            self.key,
            shape,
            dtype,
            latent.device,
            times,
            self.conditioning,
            values=self.values,
            next_forward=next_forward,
            sigmas=sigmas,
            branches=tuple(branch for branch, _ in self.members),
        )

    def stack(self, latent: Tensor) -> Tensor:
        """The latent once for each prompt."""
        return latent.repeat(len(self.members), *[1] * (latent.ndim - 1))


class Prompts:
    """The prompts of all sides (positive, negative) for a batch of latents.

    Args:
        sides: side number -> its prompts, whose tensors are looked up in `tensors`.
        mine: the sides that this rank computes.
        batch: the whole latent batch; conditioning is repeated or cut to it, as ComfyUI spreads it.
        rows: the part of the batch that this rank computes.
    """

    def __init__(
        self,
        branches: Mapping[int, Sequence[PromptSpec]],
        mine: Sequence[int],
        tensors: Mapping[str, Tensor],
        dtype: torch.dtype,
        batch: int,
        rows: slice,
    ) -> None:
        self._prompts = [(branch, prompt) for branch, prompts in branches.items() for prompt in prompts]
        self.mine = mine
        untouched = {key for _, p in self._prompts for name, key in p.tensors.items() if in_dict(name, p.values)}
        self._tensors = {
            name: tensor if name in untouched else _repeat(_cast(tensor, dtype), batch)[rows]
            for name, tensor in tensors.items()
        }
        self._kinds = [self._batching_key(prompt) for _, prompt in self._prompts]
        self._formats = [self._format(prompt) for _, prompt in self._prompts]
        self._batches: dict[tuple[int, ...], Batch] = {}

    def taking_part(self, sigma: Tensor) -> tuple[int, ...]:
        """The numbers of the prompts, of all sides, that take part in a call at `sigma`; the same on every rank.

        `sigma` is 0-dim fp32. It stays a tensor, because ComfyUI compares one with a number: that rounds the range's ends to
        fp32 as well, so that a range which ends on a step's sigma holds it.
        """
        return tuple(
            index
            for index, (_, prompt) in enumerate(self._prompts)
            if not (prompt.start is not None and sigma > prompt.start)
            and not (prompt.end is not None and sigma < prompt.end)
        )

    def at(self, sigma: Tensor) -> list[Batch]:
        """This rank's batches of a call at `sigma`. Prompts whose tensors have the same shapes share one, the last one first, as
        ComfyUI has them: there are models whose rows change one another by their order."""
        groups: dict[object, list[int]] = {}
        for index in self.taking_part(sigma):
            if self._prompts[index][0] in self.mine:
                groups.setdefault(self._kinds[index], []).append(index)
        return [self._batch(tuple(reversed(group))) for group in groups.values()]

    def groups(self, sigma: Tensor) -> list[tuple[int, ...]]:
        """The prompts of all sides that ComfyUI would run as one in a call at `sigma`, in its order."""
        groups: dict[object, list[int]] = {}
        for index in self.taking_part(sigma):
            groups.setdefault(self._formats[index], []).append(index)
        return [tuple(reversed(group)) for group in groups.values()]

    def _format(self, prompt: PromptSpec) -> object:
        """Equal for prompts that ComfyUI can run as one: of the same shapes and values."""
        if runs_alone(prompt.tensors, prompt.values):
            return id(prompt)
        shapes = tuple(sorted((name, self._tensors[key].shape) for name, key in prompt.tensors.items()))
        return shapes, tuple(sorted(prompt.values.items()))

    def _batching_key(self, prompt: PromptSpec) -> object:
        """Equal for prompts that can run as one here: text masks must be the same too, since they choose tokens."""
        mask = prompt.tensors.get(TEXT_MASK)
        return self._format(prompt), None if mask is None else tuple(self._tensors[mask].flatten().tolist())

    def _batch(self, key: tuple[int, ...]) -> Batch:
        if key not in self._batches:
            chosen = [self._prompts[index] for index in key]
            conditioning = {
                name: _joined([self._tensors[prompt.tensors[name]] for _, prompt in chosen])
                for name in chosen[0][1].tensors
            }
            self._batches[key] = Batch(
                key, tuple((branch, prompt.strength) for branch, prompt in chosen), conditioning, chosen[0][1].values
            )
        return self._batches[key]


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    """Along the batch; one alone is no copy."""
    return torch.cat(tuple(tensors)) if len(tensors) > 1 else tensors[0]


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def _repeat(tensor: Tensor, batch: int) -> Tensor:
    if tensor.shape[0] < batch:
        tensor = tensor.repeat(-(-batch // tensor.shape[0]), *[1] * (tensor.ndim - 1))
    return tensor[:batch]
