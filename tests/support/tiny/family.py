"""A family of ComfyUI's models, small: how its model is made, and what it is given."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch

from tests.support.tiny.models import draw

HEADS = 3
"""Odd, so that no even degree divides them."""

ROPE = [8, 12, 12]
"""The channels of a head of 32."""


@dataclass(frozen=True)
class Tiny:
    """One family: how its model is made, and what it is given.

    `latent` is the shape of one batch item's latent without the batch; `text` the width of the text, `extra` what else a
    prompt of so many tokens holds, by the keys of a CONDITIONING; `metadata` what the file says of itself. A text has as many
    tokens as its side's, or `tokens`. A model on the meta device, which is of a width that ComfyUI takes for granted, is written
    in fp8.
    """

    make: Callable[[Any, Any], Any]
    latent: tuple[int, ...]
    text: int
    extra: Callable[[int], Mapping[str, Any]] = lambda tokens: {}
    pooled: int = 0
    metadata: dict[str, str] | None = None
    tokens: int = 0

    def prompt(self, tokens: int, seed: int) -> list[list[Any]]:
        """A CONDITIONING of random text."""
        options: dict[str, Any] = dict(self.extra(tokens))
        if self.pooled:
            options["pooled_output"] = draw(1, self.pooled, seed=seed + 1)
        return [[draw(1, self.tokens or tokens, self.text, seed=seed), options]]


def layer_settings(operations: Any, device: str = "cpu") -> dict[str, Any]:
    return {"dtype": torch.float32, "device": device, "operations": operations}


def of_class(path: str, device: str = "cpu", **sizes: Any) -> Callable[[Any, Any], Any]:
    """What makes a class of `comfy.ldm` in these sizes."""
    module, _, name = path.rpartition(".")

    def make(_: Any, operations: Any) -> Any:
        return getattr(import_module(f"comfy.ldm.{module}"), name)(**sizes, **layer_settings(operations, device))

    return make


def shown(tokens: int) -> Mapping[str, Any]:
    """The mask of a text that is not padded."""
    return {"attention_mask": torch.ones(1, tokens, dtype=torch.int64)}


def padded(tokens: int) -> Mapping[str, Any]:
    """The mask of a text whose last two tokens are padding."""
    return {"attention_mask": (torch.arange(tokens) < tokens - 2).long()[None]}
