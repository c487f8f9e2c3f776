"""Small models: ComfyUI's classes with random weights, far smaller than ComfyUI's detection of files allows."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from types import MappingProxyType, SimpleNamespace
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from ....declaration import Declaration
from ...declared import DECLARATIONS
from ..own_call import own_call, own_class
from ..reduced import draw, randomise

HEADS = 3
"""Number of heads; odd, so that no even degree divides it."""

WIDTH = HEADS * 32
AXES = (8, 12, 12)
"""Sizes of a head's position axes, in the proportions of 16, 56 and 56."""

TEXT = 48

LISTS = frozenset({"txt_ids_dims", "x_block_self_attn_layers"})
"""Lists in a model's configuration that choose code. Other lists are sizes."""


@dataclass(frozen=True)
class Builder:
    """Builds models of ComfyUI's classes. Of a file's configuration (`chosen`), only the entries that choose code are used."""

    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    chosen: Mapping[str, Any] = field(default_factory=dict)

    @property
    def settings(self) -> dict[str, Any]:
        """Return the arguments that every ComfyUI module gets."""
        operations = import_module("comfy.ops").disable_weight_init
        return {"dtype": self.dtype, "device": self.device, "operations": operations}

    def model(self, path: str, *sizes: Any, **named: Any) -> Any:
        """Return a module of `comfy.ldm` with uninitialised weights.

        Raises:
            ImportError, AttributeError: this ComfyUI has no such class.
        """
        kind = class_of(path)
        parameters = inspect.signature(kind).parameters
        anything = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
        chosen = {
            key: value for key, value in self.chosen.items() if (anything or key in parameters) and chooses(key, value)
        }
        return kind(*sizes, **{**named, **chosen, **self.settings})


def class_of(path: str) -> Any:
    """Return a class of `comfy.ldm`. Raises ImportError or AttributeError if this ComfyUI has no such class."""
    module, _, name = path.rpartition(".")
    return getattr(import_module(f"comfy.ldm.{module}"), name)


def chooses(name: str, value: Any) -> bool:
    """Return True if a configuration entry chooses code: a switch, a name or None, but not a size."""
    return value is None or isinstance(value, bool | str) or name in LISTS


@dataclass(frozen=True)
class Case:
    """A model with its declaration and one call.

    Attributes:
        model: the diffusion model.
        declaration: its declaration.
        x: the latent, or several packed latents.
        timestep: the timestep of the call.
        arguments: the other arguments of the forward.
        kind: ComfyUI's name of the class.
        shapes: the shapes of the latents packed in `x`; empty for a single latent.
        gathers: how many of the latents are divided over the ranks.
        options: transformer_options of the call.
    """

    model: Any
    declaration: Declaration
    x: Tensor
    timestep: Any
    arguments: Mapping[str, Any]
    kind: str
    shapes: tuple[tuple[int, ...], ...] = ()
    gathers: int = 1
    options: Mapping[str, Any] = field(default_factory=dict)

    def unpacked(self, x: Tensor) -> Any:
        """Return a latent in the form that the model accepts."""
        return import_module("comfy.utils").unpack_latents(x, self.shapes) if self.shapes else x

    def stock(self) -> Tensor:
        """Return the output of ComfyUI's own forward. The model gets copies, because it may write into its input."""
        arguments: dict[str, Any] = tree_map_only(Tensor, torch.clone, dict(self.arguments))
        x = self.unpacked(self.x.clone())
        return packed(self.model(x, self.timestep, transformer_options=dict(self.options), **arguments))


@dataclass(frozen=True)
class Example:
    """A small model with random weights, and its inputs from a graph.

    Attributes:
        kind: the name of its class in comfy.supported_models.
        model: the diffusion model.
        noise: `[batch, channels, (frames,) height, width]`, or several latents.
        prompt: the prompt's entries, by ComfyUI's names. The output of a vision model is a SimpleNamespace of its attributes.
        sigma: the noise level.
        options: the transformer_options at the start of the call.
        gathers: how many latents are divided over the ranks.
    """

    kind: str
    model: Any
    noise: tuple[Tensor, ...]
    prompt: Mapping[str, Any]
    sigma: float = 0.6
    options: Mapping[str, Any] = field(default_factory=dict)
    gathers: int = 1

    def case(self, kind: str = "", configuration: Mapping[str, Any] = MappingProxyType({})) -> Case:
        """Return the call that ComfyUI's class makes of the example.

        Args:
            kind: another class around the same model.
            configuration: the file's configuration, as ComfyUI detects it.
        """
        base = own_class(kind or self.kind, self.model, configuration)
        with torch.inference_mode():  # some classes prepare the text by their weights only in this mode
            own = own_call(base, self.noise, self.prompt, self.sigma, self.options)
        # inference tensors cannot be written outside inference mode
        latent, timestep, arguments = tree_map_only(
            Tensor, torch.clone, (own.latent, own.timestep, dict(own.arguments))
        )
        shapes = () if isinstance(latent, Tensor) else tuple(tuple(each.shape) for each in latent)
        x = packed(latent[0] if len(shapes) == 1 else latent)
        declaration = DECLARATIONS[self.kind]
        return Case(self.model, declaration, x, timestep, arguments, self.kind, shapes, self.gathers, own.options)


Small: TypeAlias = Callable[[Builder], Example]


def packed(out: Any) -> Tensor:
    """Return a model's output as one tensor."""
    return out if isinstance(out, Tensor) else import_module("comfy.utils").pack_latents(out)[0]  # type: ignore[no-any-return]


def example(
    kind: str, model: Any, noise: Tensor | Sequence[Tensor], prompt: Mapping[str, Any], **fields: Any
) -> Example:
    """Return an example of the model, with random weights. `noise` may be several latents."""
    latents = (noise,) if isinstance(noise, Tensor) else tuple(noise)
    return Example(kind, randomise(model, seed=len(kind)), latents, prompt, **fields)


def seen(tokens: int = 5, seed: int = 4, width: int = 1280) -> SimpleNamespace:
    """Return the output of a vision model: `[1, tokens, width]` under each name that classes read."""
    states = draw(1, tokens, width, seed=seed)
    return SimpleNamespace(penultimate_hidden_states=states, last_hidden_state=states)


def text(tokens: int = 7, batch: int = 1) -> Tensor:
    """Return a random prompt `[batch, tokens, TEXT]`."""
    return draw(batch, tokens, TEXT, seed=2)


HIDING = torch.tensor([[1, 1, 0, 1, 1, 0, 0]])
"""A text mask of seven tokens, three of which are hidden."""


def first_frame(frames: int, height: int, width: int) -> Tensor:
    """Return the mask of a video with a given first frame: `[1, 1, frames, height, width]`, 1 where the model denoises."""
    mask = torch.ones(1, 1, frames, height, width)
    mask[:, :, 0] = 0
    return mask
