"""Functions of ComfyUI's nodes that workers make again, beside the nodes' own: on a whole, and on the parts that ranks have."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from ....parallel_backend.models.comfyui.features.free_u import function_made
from ....parallel_backend.models.comfyui.features.guidance import function_of
from ..verdicts import verdicts

TOLERANCE = 1e-6
ARGUMENTS = "denoised", "cond_denoised", "uncond_denoised", "input"
"""The latents that a function behind the guidance is given by the workers, with the cfg."""


def fault_of(function: Any) -> str | None:
    """Return the name of a node's function that the workers cannot rebuild, with the reason; None if they can rebuild it."""
    module = Path(getattr(getattr(function, "__code__", None), "co_filename", "")).stem
    node = getattr(function, "__qualname__", "").partition(".<locals>")[0]
    if module not in TRIALS or not node:
        return None
    name = f"comfy_extras.{module}.{node}"
    return verdicts().fault("closure", lambda: _difference(function, module), {name})


def _difference(function: Any, module: str) -> str:
    with torch.inference_mode(False), torch.no_grad():
        equal = TRIALS[module](function, module)
    return "" if equal else "which gives something else where it was tried as the workers run it"


def _guidance(function: Any, module: str) -> bool:
    """Return True if the rebuilt function treats each latent of a batch separately and repeats its results."""
    arguments = {name: _random(number, (2, 4, 6, 5)) for number, name in enumerate(ARGUMENTS)}
    rebuilt = function_of(module, function.__qualname__, inspect.getclosurevars(function).nonlocals)
    more: dict[str, Any] = {"sigma": torch.ones(2), "model": None, "model_options": {}, "cond": None, "uncond": None}
    whole = [function({**_copies(arguments), "cond_scale": 3.0, **more}) for _ in range(2)]
    rows = [
        rebuilt({name: value[row : row + 1].clone() for name, value in arguments.items()} | {"cond_scale": 3.0})
        for row in (0, 1)
    ]
    return _close(whole[0], torch.cat(rows)) and _close(*whole)


def _attention(function: Any, module: str) -> bool:
    """Return True if the rebuilt function treats each token separately, with text before the picture or as one stream."""
    out = _random(0, (2, 8, 4))
    rebuilt = function_of(module, function.__qualname__, inspect.getclosurevars(function).nonlocals)
    branches = {"cond_or_uncond": [1, 0]}
    equal = True
    for whole, parts in ((None, (None, None)), ([3, 8], ([3, 4], [0, 4]))):
        runs = zip((out[:, :4], out[:, 4:]), parts, strict=True)
        output = function(out.clone(), branches if whole is None else {**branches, "img_slice": whole})
        local = [
            rebuilt(part.clone(), branches if own is None else {**branches, "img_slice": own}) for part, own in runs
        ]
        equal = equal and _close(output, torch.cat(local, dim=1))
    return equal


def _skip(function: Any, module: str) -> bool:
    """A block's arguments, as they were given."""
    arguments = {"img": _random(0, (1, 4, 4)), "txt": _random(1, (1, 3, 4))}
    before = _copies(arguments)
    output = function(arguments, {"original_block": None})
    return output.keys() == before.keys() and all(torch.equal(output[name], value) for name, value in before.items())


def _free_u(function: Any, module: str) -> bool:
    """Return True if the rebuilt function treats each row of a batch separately."""
    scales = inspect.getclosurevars(function).nonlocals["scale_dict"]
    rebuilt = function_made(function.__qualname__, scales)
    equal = True
    for channels in scales:
        h, skipped = (_random(number, (2, channels, 4, 4)) for number in range(2))
        whole = function(h.clone(), skipped.clone(), {})
        rows = [rebuilt(h[row : row + 1].clone(), skipped[row : row + 1].clone(), {}) for row in (0, 1)]
        equal = equal and all(
            _close(*pair) for pair in zip(whole, map(torch.cat, zip(*rows, strict=True)), strict=True)
        )
    return equal


TRIALS: Mapping[str, Callable[[Any, str], bool]] = MappingProxyType(
    {
        "nodes_cfg": _guidance,
        "nodes_eps": _guidance,
        "nodes_nag": _attention,
        "nodes_slg": _skip,
        "nodes_freelunch": _free_u,
    }
)
"""By module, whether a function gives what it gives when workers run it."""


def _copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in tensors.items()}


def _close(ours: Tensor, theirs: Tensor) -> bool:
    return ours.shape == theirs.shape and float((ours - theirs).norm()) <= TOLERANCE * float(theirs.norm())


def _random(seed: int, shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))
