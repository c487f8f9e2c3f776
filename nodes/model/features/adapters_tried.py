"""ComfyUI's weight adapters on a small weight, beside the workers' arithmetic."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import comfy.lora
import comfy.utils
import comfy.weight_adapter as kinds
import torch
from torch import Tensor

from ....parallel_backend.weights.adapters.lora import AdapterSet, apply

TOLERANCE = 1e-6
SIZES = (6, 4), (6,), (6, 2, 2), (6, 2, 3, 2), (6, 2, 1, 2, 2)
"""The shapes of the weights that adapters are tried on: a matrix, a vector, and convolutions of one to three dimensions."""

OF_ALL = frozenset({"comfy.lora.calculate_weight", "comfy.utils.swap_scale_shift"})
"""What takes part in every kind of adapter."""

ADAPTERS: Mapping[str, str] = {name.lower(): f"{name}Adapter" for name in ("LoRA", "LoHa", "LoKr", "GLoRA", "OFT")}
"""ComfyUI's class of each kind of adapter, by the workers' name of the kind."""

Translate = Callable[[Sequence[int], Mapping[str, Any]], AdapterSet]
"""Makes of a size and ComfyUI's patches of a weight `w` of that size what the workers are told."""


def things_of(kind: str) -> frozenset[str]:
    """The names of the things of ComfyUI's that a kind of adapter depends on."""
    return OF_ALL | ({f"comfy.weight_adapter.{kind}.{ADAPTERS[kind]}.calculate_weight"} if kind in ADAPTERS else set())


def fault(kind: str, translate: Translate) -> str:
    """What is wrong with ComfyUI's things of a kind of adapter, behind their name; empty if both give the same."""
    for size in SIZES:
        for value in _values(kind, size):
            for patch in _patches(value):
                before = _random(0, size)
                expected = comfy.lora.calculate_weight([patch], before.clone(), "w")
                adapters = translate(size, {"diffusion_model.w": [patch]})
                ours = before.clone()
                apply(adapters.recipe["w"], adapters.tensors, ours, slice(0, size[0]), size)
                if expected.shape != ours.shape or float((ours - expected).norm()) > TOLERANCE * float(expected.norm()):
                    return "which gives other weights than the workers' where both were tried"
    return ""


def _patches(value: Any) -> Iterator[tuple[Any, ...]]:
    """As ComfyUI records them: plain, with other strengths, and moved rows."""
    yield 1.0, value, 1.0, None, None
    yield 0.7, value, 0.9, None, None
    if isinstance(value, tuple) or getattr(value, "name", "") != "oft":
        yield 0.7, value, 1.0, None, comfy.utils.swap_scale_shift


def _values(kind: str, size: tuple[int, ...]) -> Iterator[Any]:
    rows, columns, rank = size[0], math.prod(size[1:]), 2
    channels = math.prod(size[1:2])
    up, down, left, right = (_random(seed, shape) for seed, shape in enumerate([(rows, rank), (rank, columns)] * 2, 1))
    dora = _random(9, (rows, *[1] * (len(size) - 1))).abs() + 0.5
    match kind:
        case "lora":
            yield from (kinds.LoRAAdapter(set(), (up, down, alpha, None, None, None)) for alpha in (None, 1.5))
            yield kinds.LoRAAdapter(set(), (up, down, 1.5, None, dora, None))
        case "loha":
            yield kinds.LoHaAdapter(set(), (up, down, 1.5, left, right, None, None, None))
            yield kinds.LoHaAdapter(set(), (up, down, None, left, right, None, None, dora))
        case "lokr":
            wide = min(channels, 2)
            first, second = _random(5, (2, wide)), _random(6, (3, channels // wide, *size[2:]))
            yield kinds.LoKrAdapter(set(), (first, second, None, None, None, None, None, None, None))
            factors = _random(7, (3, 1)), _random(8, (1, columns // wide))
            yield kinds.LoKrAdapter(set(), (first, None, 1.5, None, None, *factors, None, dora))
        case "glora":
            if len(size) > 1:  # ComfyUI takes none for a vector
                a1, a2 = _random(5, (channels, rank)), _random(6, (rank, channels))
                yield kinds.GLoRAAdapter(set(), (a1, a2, up, down, 1.5, None))
        case "oft":
            yield from (
                kinds.OFTAdapter(set(), (0.1 * _random(5, (3, 2, 2)), None, alpha, None)) for alpha in (0.0, 0.05)
            )
        case _:
            yield kind, (_random(5, size),)


def _random(seed: int, size: tuple[int, ...]) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))
