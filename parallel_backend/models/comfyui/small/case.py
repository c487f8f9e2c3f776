"""What a small model is: one of ComfyUI's classes with random weights, far smaller than its detection of files allows."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from ...declared import DECLARATIONS
from ...spread.declaration import Declaration
from .drawn import draw, randomise

HEADS = 3
"""Odd, so that no even degree divides them."""

WIDTH = HEADS * 32
AXES = (8, 12, 12)
"""Of a head's positions, in the proportions of 16, 56 and 56."""

TEXT = 48

LISTS = frozenset({"txt_ids_dims", "x_block_self_attn_layers"})
"""Lists of a model's configuration that choose code; others are sizes."""


@dataclass(frozen=True)
class Builder:
    """Makes models of ComfyUI's classes.

    `chosen` is what a file's configuration says: of it is taken what chooses code.
    """

    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    chosen: Mapping[str, Any] = field(default_factory=dict)

    @property
    def settings(self) -> dict[str, Any]:
        """What each of ComfyUI's modules is made with."""
        operations = import_module("comfy.ops").disable_weight_init
        return {"dtype": self.dtype, "device": self.device, "operations": operations}

    def model(self, path: str, *sizes: Any, **named: Any) -> Any:
        """A module of `comfy.ldm`, of uninitialised weights.

        Raises:
            ImportError, AttributeError: this ComfyUI has no such class.
        """
        kind = class_of(path)
        taken = inspect.signature(kind).parameters
        anything = any(each.kind is each.VAR_KEYWORD for each in taken.values())
        chosen = {
            key: value for key, value in self.chosen.items() if (anything or key in taken) and chooses(key, value)
        }
        return kind(*sizes, **{**named, **chosen, **self.settings})


def class_of(path: str) -> Any:
    """A class of `comfy.ldm`. Raises ImportError or AttributeError where this ComfyUI has none."""
    module, _, name = path.rpartition(".")
    return getattr(import_module(f"comfy.ldm.{module}"), name)


def chooses(name: str, value: Any) -> bool:
    """Whether an entry of a model's configuration chooses code: a switch, a name or what is left out, and no size."""
    return value is None or isinstance(value, bool | str) or name in LISTS


@dataclass(frozen=True)
class Case:
    """A model, what declares it, one call (`x`, `timestep` and the arguments of its forward) and what ComfyUI calls it.

    With `shapes` the model is given several latents, which are packed in `x`. `gathers` is how many of them are spread.
    `options` are its transformer_options.
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
        """A latent as the model takes it."""
        return import_module("comfy.utils").unpack_latents(x, self.shapes) if self.shapes else x

    def stock(self) -> Tensor:
        """What ComfyUI's own forward gives, which may write into what it is given."""
        arguments: dict[str, Any] = tree_map_only(Tensor, torch.clone, dict(self.arguments))
        x = self.unpacked(self.x.clone())
        return packed(self.model(x, self.timestep, transformer_options=dict(self.options), **arguments))


Small: TypeAlias = Callable[[Builder], Case]


def packed(out: Any) -> Tensor:
    """A model's output as one tensor."""
    return out if isinstance(out, Tensor) else import_module("comfy.utils").pack_latents(out)[0]  # type: ignore[no-any-return]


def case(
    kind: str,
    model: Any,
    x: Tensor | Sequence[Tensor],
    arguments: Mapping[str, Any],
    timestep: Any = None,
) -> Case:
    """A model with random weights and a call of it; `x` may be several latents."""
    shapes = () if isinstance(x, Tensor) else tuple(tuple(each.shape) for each in x)
    latent = packed(x[0] if len(shapes) == 1 else x)
    time = torch.full((latent.shape[0],), 0.6) if timestep is None else timestep
    return Case(randomise(model, seed=len(kind)), DECLARATIONS[kind], latent, time, arguments, kind, shapes)


def text(tokens: int = 7, batch: int = 1) -> Tensor:
    """A random prompt `[batch, tokens, TEXT]`."""
    return draw(batch, tokens, TEXT, seed=2)
