"""Trials of functions of ComfyUI's nodes that workers rebuild: on whole tensors, and on the parts that ranks have."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from ....parallel_backend.models.comfyui.features.free_u import function_made
from ....parallel_backend.models.comfyui.features.guidance import function_of
from ..trials import TOLERANCE, random, verdicts

ARGUMENTS = "denoised", "cond_denoised", "uncond_denoised", "input"
"""The latents that a function behind the guidance is given by the workers, with the cfg."""


def mismatch_of(function: Any) -> str | None:
    """Return the name of a node's function that the workers cannot rebuild, with the reason; None if they can rebuild it."""
    module = Path(getattr(getattr(function, "__code__", None), "co_filename", "")).stem
    node = getattr(function, "__qualname__", "").partition(".<locals>")[0]
    if module not in TRIALS or not node:
        return None
    results, tolerance = TRIALS[module]
    name = f"comfy_extras.{module}.{node}"
    return verdicts().mismatch("closure", functools.partial(results, function, module), {name}, tolerance)


def guidance_results(function: Any, module: str) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield results for each latent of a batch separately and for the whole batch, and those of a second call."""
    arguments = {name: random(number, (2, 4, 6, 5)) for number, name in enumerate(ARGUMENTS)}
    rebuilt = function_of(module, function.__qualname__, inspect.getclosurevars(function).nonlocals)
    more: dict[str, Any] = {"sigma": torch.ones(2), "model": None, "model_options": {}, "cond": None, "uncond": None}
    whole = [function({**_copies(arguments), "cond_scale": 3.0, **more}) for _ in range(2)]
    rows = [
        rebuilt({name: value[row : row + 1].clone() for name, value in arguments.items()} | {"cond_scale": 3.0})
        for row in (0, 1)
    ]
    yield torch.cat(rows), whole[0]
    yield whole[1], whole[0]


def _attention(function: Any, module: str) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield results for each half of the tokens and for all, with text before the picture and as one stream."""
    out = random(0, (2, 8, 4))
    rebuilt = function_of(module, function.__qualname__, inspect.getclosurevars(function).nonlocals)
    branches = {"cond_or_uncond": [1, 0]}
    for whole, parts in ((None, (None, None)), ([3, 8], ([3, 4], [0, 4]))):
        runs = zip((out[:, :4], out[:, 4:]), parts, strict=True)
        output = function(out.clone(), branches if whole is None else {**branches, "img_slice": whole})
        local = [
            rebuilt(part.clone(), branches if own is None else {**branches, "img_slice": own}) for part, own in runs
        ]
        yield torch.cat(local, dim=1), output


def _skip(function: Any, module: str) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the arguments of a block, and what the function makes of them."""
    arguments, absent = {"img": random(0, (1, 4, 4)), "txt": random(1, (1, 3, 4))}, torch.empty(0)
    output = function(_copies(arguments), {"original_block": None})
    for name in {*arguments, *output}:
        yield arguments.get(name, absent), output.get(name, absent)


def _free_u(function: Any, module: str) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield results for each row of a batch separately and for the whole batch."""
    scales = inspect.getclosurevars(function).nonlocals["scale_dict"]
    rebuilt = function_made(function.__qualname__, scales)
    for channels in scales:
        h, skipped = (random(number, (2, channels, 4, 4)) for number in range(2))
        whole = function(h.clone(), skipped.clone(), {})
        rows = [rebuilt(h[row : row + 1].clone(), skipped[row : row + 1].clone(), {}) for row in (0, 1)]
        yield from zip(map(torch.cat, zip(*rows, strict=True)), whole, strict=True)


TRIALS: Mapping[str, tuple[Callable[[Any, str], Iterator[tuple[Tensor, Tensor]]], float]] = MappingProxyType(
    {
        "nodes_cfg": (guidance_results, TOLERANCE),
        "nodes_eps": (guidance_results, TOLERANCE),
        "nodes_nag": (_attention, TOLERANCE),
        "nodes_slg": (_skip, 0.0),
        "nodes_freelunch": (_free_u, TOLERANCE),
    }
)
"""The trial of a module's functions, and its tolerance."""


def _copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in tensors.items()}
