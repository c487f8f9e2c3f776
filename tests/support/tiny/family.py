"""The description of a small model of ComfyUI's: its maker and its inputs."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

import torch

from tests.support.tiny.models import draw

HEADS = 3
"""Head count of the tiny models: odd, so that no even degree divides it."""

ROPE = [8, 12, 12]
"""Channels of the rotary embedding's axes, for a head of 32."""


@dataclass(frozen=True)
class Tiny:
    """The maker and the inputs of one family's small model.

    `latent` is the latent's shape without the batch, and `text` the width of the text. `extra` returns the other entries of a
    prompt of a given token count, by a CONDITIONING's keys. `metadata` is the file's metadata. A text has `tokens` tokens, or
    by default as many as its prompt asks for. A model on the meta device has the real width, which ComfyUI assumes, and is
    written in fp8.
    """

    make: Callable[[Any, Any], Any]
    latent: tuple[int, ...]
    text: int
    extra: Callable[[int], Mapping[str, Any]] = lambda tokens: {}
    pooled: int = 0
    metadata: dict[str, str] | None = None
    tokens: int = 0

    def prompt(self, tokens: int, seed: int) -> list[list[Any]]:
        """Return a CONDITIONING of random text."""
        options: dict[str, Any] = dict(self.extra(tokens))
        if self.pooled:
            options["pooled_output"] = draw(1, self.pooled, seed=seed + 1)
        return [[draw(1, self.tokens or tokens, self.text, seed=seed), options]]


def of_class(path: str, device: str = "cpu", **sizes: Any) -> Callable[[Any, Any], Any]:
    """Return a maker of a class of `comfy.ldm` with these sizes."""
    module, _, name = path.rpartition(".")

    def make(_: Any, operations: Any) -> Any:
        settings = {"dtype": torch.float32, "device": device, "operations": operations}
        return getattr(import_module(f"comfy.ldm.{module}"), name)(**sizes, **settings)

    return make


def reduced(path: str, sizes: Mapping[str, Any], *inputs: Any, pooled: int = 0, **detected: Any) -> Tiny:
    """Return a model with `sizes` in the file's metadata, because ComfyUI assumes other sizes.

    families/conftest.py has a ComfyUI that reads them. ComfyUI detects the sizes in `detected`.
    """
    model = Tiny(of_class(path, **sizes, **detected), *inputs)
    return replace(model, pooled=pooled, metadata={"sizes": json.dumps(sizes)})


def shown(tokens: int) -> Mapping[str, Any]:
    """Return the mask of a text without padding."""
    return {"attention_mask": torch.ones(1, tokens, dtype=torch.int64)}


def padded(tokens: int) -> Mapping[str, Any]:
    """Return the mask of a text whose last two tokens are padding."""
    return {"attention_mask": (torch.arange(tokens) < tokens - 2).long()[None]}
