"""The prompts that take part in a model call, and their batches, which run as one forward."""

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
"""The conditioning that masks text tokens."""


@dataclass(frozen=True)
class Batch:
    """Prompts that run as one forward, with their latents stacked along the batch dimension.

    Attributes:
        key: the numbers of the prompts.
        members: the branch and the strength of each prompt.
        conditioning: the tensors of all prompts, concatenated along the batch dimension.
        values: the plain values of the conditioning, equal for all prompts.
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
        """Return the model's inputs besides the latent.

        Args:
            latent: the latent `[batch, channels, ...]`.
            timestep: 0-dim, on the latent's device.
            dtype: the compute dtype.
            sigmas: as in `Inputs`.
            next_forward: as in `Inputs`.
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
        """Return the latent repeated once for each prompt, along the batch dimension."""
        return latent.repeat(len(self.members), *[1] * (latent.ndim - 1))


class Prompts:
    """The prompts of all branches (positive, negative) for a batch of latents.

    Args:
        branches: the prompts of each branch, by the branch's number.
        mine: the branches that this rank computes.
        tensors: the request's tensors, by the names in the prompts.
        dtype: the compute dtype.
        batch: the number of latents in the whole batch. Conditioning is repeated or cut to it, as in ComfyUI.
        rows: the rows of the batch that this rank computes.
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
        """Return the numbers of the prompts, of all branches, that take part in a call at `sigma`; the same on every rank.

        `sigma` is 0-dim fp32. It stays a tensor, because ComfyUI compares a tensor with a number. That comparison rounds the
        range's ends to fp32 as well, so a range that ends on a step's sigma includes the step.
        """
        return tuple(
            index
            for index, (_, prompt) in enumerate(self._prompts)
            if not (prompt.start is not None and sigma > prompt.start)
            and not (prompt.end is not None and sigma < prompt.end)
        )

    def at(self, sigma: Tensor) -> list[Batch]:
        """Return this rank's batches of a call at `sigma`.

        Prompts whose tensors have the same shapes share a batch, the last prompt first. This is ComfyUI's order, and in some
        models rows change one another by their order.
        """
        groups: dict[object, list[int]] = {}
        for index in self.taking_part(sigma):
            if self._prompts[index][0] in self.mine:
                groups.setdefault(self._kinds[index], []).append(index)
        return [self._batch(tuple(reversed(group))) for group in groups.values()]

    def groups(self, sigma: Tensor) -> list[tuple[int, ...]]:
        """Return the groups of prompts, of all branches, that ComfyUI would run as one forward at `sigma`, in its order."""
        groups: dict[object, list[int]] = {}
        for index in self.taking_part(sigma):
            groups.setdefault(self._formats[index], []).append(index)
        return [tuple(reversed(group)) for group in groups.values()]

    def _format(self, prompt: PromptSpec) -> object:
        """Return a key that is equal for prompts that ComfyUI can run as one forward: those of the same shapes and values."""
        if runs_alone(prompt.tensors, prompt.values):
            return id(prompt)
        shapes = tuple(sorted((name, self._tensors[key].shape) for name, key in prompt.tensors.items()))
        return shapes, tuple(sorted(prompt.values.items()))

    def _batching_key(self, prompt: PromptSpec) -> object:
        """Return a key that is equal for prompts that can share a batch. Text masks must be equal, because they drop tokens."""
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
    """Concatenate tensors along the batch dimension; return a single tensor without a copy."""
    return torch.cat(tuple(tensors)) if len(tensors) > 1 else tensors[0]


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def _repeat(tensor: Tensor, batch: int) -> Tensor:
    if tensor.shape[0] < batch:
        tensor = tensor.repeat(-(-batch // tensor.shape[0]), *[1] * (tensor.ndim - 1))
    return tensor[:batch]
