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
"""What a model's code fails with on what it does not take."""


@dataclass(frozen=True)
class Sizes:
    """`picture` is the latent's (frames,) height and width, `text` how many tokens the text has, `rows` how many are a batch."""

    picture: tuple[int, ...]
    text: int
    rows: int = 1


@dataclass(frozen=True)
class ModelCall:
    """What one of ComfyUI's diffusion models is called with: `[batch, channels, (frames,) height, width]` and the others."""

    latent: Tensor
    timestep: Any
    arguments: Mapping[str, Any]
    options: Options = field(default_factory=dict)

    def of(self, model: Callable[..., Any], options: Options | None = None) -> Tensor:
        """What the model gives, which may write into what it is given."""
        arguments: dict[str, Any] = tree_map_only(Tensor, torch.clone, dict(self.arguments))
        out = model(
            self.latent.clone(), self.timestep, transformer_options={**self.options, **(options or {})}, **arguments
        )
        assert isinstance(out, Tensor)
        return out

    def unfilled(self) -> ModelCall:
        """The same in bf16, on the meta device."""

        def without_values(tensor: Tensor) -> Tensor:
            return tensor.to("meta", torch.bfloat16 if tensor.is_floating_point() else tensor.dtype)

        arguments: dict[str, Any] = tree_map_only(Tensor, without_values, dict(self.arguments))
        options: dict[str, Any] = tree_map_only(Tensor, lambda tensor: tensor.to("meta"), dict(self.options))
        timestep = tree_map_only(Tensor, lambda tensor: tensor.to("meta"), self.timestep)
        return ModelCall(without_values(self.latent), timestep, arguments, options)

    def fits(self, model: Callable[..., Any]) -> bool:
        """Whether the model takes it."""
        try:
            self.of(model)
        except FAILS:
            return False
        return True

    @property
    def latents(self) -> dict[str, list[tuple[int, ...]]]:
        """The shapes of the arguments that are latents, or lists of such."""
        return self._of_dimensions(self.latent.ndim)

    @property
    def latents_and_frames(self) -> tuple[str, ...]:
        """The arguments that are latents, and, beside a video, frames by themselves."""
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
        """The arguments that have the latent's frames, height and width, as controls have."""
        picture = self.latent.shape[2:]
        tensors = {name: value for name, value in self.arguments.items() if isinstance(value, Tensor)}
        return tuple(
            name
            for name, each in tensors.items()
            if each.is_floating_point() and each.shape[-len(picture) :] == picture
        )

    def disturbed(self, axis: int, index: slice, of: str = "") -> ModelCall:
        """With other values in some rows, columns or frames of the latent, or of an argument that has those.

        `axis` counts those of the picture.
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
        sizes: those of the call that is asked about.
        batches: whether `make` heeds how many rows it is to have.
        lengths: those that lists of the model have in its file, where they are longer, by their paths.
    """

    model: nn.Module
    make: Callable[[Sizes], ModelCall]
    sizes: Sizes
    batches: bool = False
    lengths: Mapping[str, int] = field(default_factory=dict)

    def call(self, sizes: Sizes) -> ModelCall:
        """The call of a size. Raises Undescribed if none can be made."""
        try:
            return self.make(sizes)
        except FAILS as error:
            raise Undescribed(f"no call of another size can be made ({in_a_line(error)})") from error


def noise_like(tensor: Tensor) -> Tensor:
    """Normal numbers, the same each time."""
    generator = torch.Generator().manual_seed(tensor.numel())
    return torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype)


STRENGTH = 0.6
"""The noise level of a call, as a fraction of the model's highest sigma."""


class ByClass:
    """Makes calls of one model.

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
            raise TypeError("its latent is several ones packed together")
        return ModelCall(class_call.latent, class_call.timestep, class_call.arguments, class_call.options)
