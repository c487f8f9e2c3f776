"""Calls of a model, at any size."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from ..conditioning import NAMES, Conditioning, flatten
from ..models.comfyui.own_call import conditioning_of, own_call
from ..models.comfyui.proof.ranks import in_a_line
from .rules import Undescribed

Options = Mapping[str, Any]

FAILS = (LookupError, ValueError, TypeError, RuntimeError, ArithmeticError, AssertionError, AttributeError)
"""Exceptions that a model's code raises on input that it does not accept."""


@dataclass(frozen=True)
class Sizes:
    """The sizes of a call: the latent's (frames,) height and width, the number of text tokens, and the rows of the batch."""

    picture: tuple[int, ...]
    text: int
    rows: int = 1


@dataclass(frozen=True)
class ModelCall:
    """The input of a ComfyUI diffusion model: a latent `[batch, channels, (frames,) height, width]` and the other arguments."""

    latent: Tensor
    timestep: Any
    arguments: Mapping[str, Any]
    options: Options = field(default_factory=dict)

    def of(self, model: Callable[..., Any], options: Options | None = None) -> Tensor:
        """Return the model's output. The model gets copies of the tensors, because it may write into them."""
        arguments: dict[str, Any] = tree_map_only(Tensor, torch.clone, dict(self.arguments))
        out = model(
            self.latent.clone(), self.timestep, transformer_options={**self.options, **(options or {})}, **arguments
        )
        assert isinstance(out, Tensor)
        return out

    def unfilled(self) -> ModelCall:
        """Return the same call in bf16, on the meta device."""

        def without_values(tensor: Tensor) -> Tensor:
            return tensor.to("meta", torch.bfloat16 if tensor.is_floating_point() else tensor.dtype)

        arguments: dict[str, Any] = tree_map_only(Tensor, without_values, dict(self.arguments))
        options: dict[str, Any] = tree_map_only(Tensor, lambda tensor: tensor.to("meta"), dict(self.options))
        timestep = tree_map_only(Tensor, lambda tensor: tensor.to("meta"), self.timestep)
        return ModelCall(without_values(self.latent), timestep, arguments, options)

    def fits(self, model: Callable[..., Any]) -> bool:
        """Return True if the model accepts this call."""
        try:
            self.of(model)
        except FAILS:
            return False
        return True

    @property
    def latents(self) -> dict[str, list[tuple[int, ...]]]:
        """Return the shapes of each argument that is a latent or a list of latents, by argument name."""
        return self._of_dimensions(self.latent.ndim)

    @property
    def latents_and_frames(self) -> tuple[str, ...]:
        """Return the names of the arguments that are latents. For a video, single frames count too."""
        frames = self._of_dimensions(4) if self.latent.ndim > 4 else {}
        return (*self.latents, *frames)

    def _of_dimensions(self, dims: int) -> dict[str, list[tuple[int, ...]]]:
        shapes = {
            name: [tuple(each.shape) for each in tree_leaves(value) if isinstance(each, Tensor)]
            for name, value in self.arguments.items()
        }
        return {
            name: tensor_shapes
            for name, tensor_shapes in shapes.items()
            if tensor_shapes and all(len(each) == dims for each in tensor_shapes)
        }

    @property
    def pictured(self) -> tuple[str, ...]:
        """Return the names of the arguments with the latent's frames, height and width, such as controls."""
        picture = self.latent.shape[2:]
        tensors = {name: value for name, value in self.arguments.items() if isinstance(value, Tensor)}
        return tuple(
            name
            for name, each in tensors.items()
            if each.is_floating_point() and each.shape[-len(picture) :] == picture
        )

    def disturbed(self, axis: int, index: slice, of: str = "") -> ModelCall:
        """Return the call with noise added to some rows, columns or frames of the latent, or of the argument `of`.

        Args:
            axis: the axis to cut, counted from the first axis of the picture.
            index: the indices along this axis to disturb.
            of: the name of an argument that has the picture's axes; empty for the latent.
        """
        changed = (self.arguments[of] if of else self.latent).clone()
        dim = changed.ndim - len(self.latent.shape[2:]) + axis
        part = changed[(slice(None),) * dim + (index,)]
        part += noise_like(part)
        return replace(self, arguments={**self.arguments, of: changed}) if of else replace(self, latent=changed)


@dataclass(frozen=True)
class Subject:
    """A small model and its calls at any size.

    Attributes:
        model: ComfyUI's diffusion model, in fp32 on the CPU, with at least two members of each of its lists.
        make: makes the call of a size.
        sizes: the sizes of the call to derive for.
        batches: True if `make` heeds the number of rows.
        lengths: the lengths of the model's lists in its file, by path, where these lists are longer there.
    """

    model: nn.Module
    make: Callable[[Sizes], ModelCall]
    sizes: Sizes
    batches: bool = False
    lengths: Mapping[str, int] = field(default_factory=dict)

    def call(self, sizes: Sizes) -> ModelCall:
        """Return the call of a size. Raises Undescribed if `make` fails."""
        try:
            return self.make(sizes)
        except FAILS as error:
            raise Undescribed(f"no call of another size can be made ({in_a_line(error)})") from error


def noise_like(tensor: Tensor) -> Tensor:
    """Return normal random numbers with the tensor's shape, the same numbers each time."""
    generator = torch.Generator().manual_seed(tensor.numel())
    return torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype)


STRENGTH = 0.6
"""The noise level of a call, as a fraction of the model's highest sigma."""


class ByClass:
    """A maker of calls for one model, through the methods of ComfyUI's class.

    Args:
        base: ComfyUI's BaseModel, in memory.
    """

    def __init__(self, base: Any) -> None:
        self._base = base
        self._channels = base.latent_format.latent_channels

    def conditioning(self, sizes: Sizes, prompt: Mapping[str, Any]) -> Conditioning:
        """Return the conditioning that the class's `extra_conds` makes of a prompt, for one row."""
        conditioning = Conditioning({})
        for name, entry in conditioning_of(self._base, [self.latent(sizes)], prompt).items():
            flatten(NAMES.get(name, name), entry.cond, conditioning.tensors, conditioning.values)
        return conditioning

    def latent(self, sizes: Sizes) -> Tensor:
        """Return noise `[rows, channels, (frames,) height, width]`."""
        generator = torch.Generator().manual_seed(1)
        return torch.randn(sizes.rows, self._channels, *sizes.picture, generator=generator)

    def call(self, sizes: Sizes, prompt: Mapping[str, Any]) -> ModelCall:
        """Return the arguments of one forward call.

        Raises:
            TypeError: the model takes several latents.
        """
        sigma = float(self._base.model_sampling.sigma_max) * STRENGTH
        class_call = own_call(self._base, [self.latent(sizes)], prompt, sigma)
        if not isinstance(class_call.latent, Tensor):
            raise TypeError("its latent packs several latents in one")
        return ModelCall(class_call.latent, class_call.timestep, class_call.arguments, class_call.options)
