"""Replacements of ComfyUI's noise samplers for recording: each draw becomes an entry of the program."""

from __future__ import annotations

import contextlib
import functools
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from inspect import isfunction
from types import FunctionType, MappingProxyType, ModuleType
from typing import Any
from unittest.mock import patch

import comfy.k_diffusion.sampling as comfy_sampling

from ....parallel_backend.denoise.program import NoiseSource
from .latent import Recorded, number_of
from .tape import Tape

NoiseSampler = Callable[[Any, Any], Recorded]


def default_noise_sampler(x: Any, seed: Any = None) -> NoiseSampler:
    """Replace ComfyUI's function of this name: record independent noise for each call."""
    tape = _tape_of(x)
    return _source(tape, NoiseSource("gaussian", _seed(tape, seed)))


def brownian_noise_sampler(
    x: Any, sigma_min: Any, sigma_max: Any, seed: Any = None, transform: Any = None, cpu: bool = False
) -> NoiseSampler:
    """Replace ComfyUI's BrownianTreeNoiseSampler: record one path over the sigmas."""
    tape = _tape_of(x)
    if transform is not None:
        raise tape.refuse("draws noise over transformed sigmas")
    low, high = (_sigma(tape, limit) for limit in (sigma_min, sigma_max))
    if not low <= high:
        raise tape.refuse("draws noise over rising sigmas")
    return _source(tape, NoiseSource("brownian", _seed(tape, seed), low, high, bool(cpu)))


STANDING_IN: Mapping[str, Callable[..., NoiseSampler]] = MappingProxyType(
    {"default_noise_sampler": default_noise_sampler, "BrownianTreeNoiseSampler": brownian_noise_sampler}
)
"""The replacements of ComfyUI's noise samplers, by ComfyUI's name."""


@contextlib.contextmanager
def recorded_noise(function: Callable[..., Any]) -> Iterator[None]:
    """Replace ComfyUI's noise samplers in ComfyUI's modules and in those of the function's package, inside this context."""
    while isinstance(function, functools.partial):
        function = function.func
    package = (getattr(function, "__module__", None) or "").partition(".")[0]
    with contextlib.ExitStack() as stack:
        for module in _modules(package):
            for name, ours in _replacements(module):
                stack.enter_context(patch.object(module, name, ours))
        yield


def _replacements(module: ModuleType) -> list[tuple[str, Callable[..., NoiseSampler]]]:
    """Return the names of ComfyUI's noise samplers in a module, each with its replacement."""
    return [(name, ours) for name, value in vars(module).items() if (ours := _standing_in(value)) is not None]


def _standing_in(value: Any) -> Callable[..., NoiseSampler] | None:
    """Return the replacement for a ComfyUI noise sampler; None for any other object.

    A noise sampler of a module that another pack has reloaded counts too.
    """
    if not isinstance(value, (FunctionType, type)) or value.__qualname__ not in STANDING_IN:
        return None
    functions = [value] if isinstance(value, FunctionType) else filter(isfunction, vars(value).values())
    comfyuis = all(method.__globals__ is vars(comfy_sampling) for method in functions)
    return STANDING_IN[value.__qualname__] if comfyuis else None


def _modules(package: str) -> Iterator[ModuleType]:
    packages = {package, "comfy", "comfy_extras"}
    for name in [*sys.modules]:
        if name.partition(".")[0] in packages and isinstance(module := sys.modules.get(name), ModuleType):
            yield module


def _tape_of(x: Any) -> Tape:
    if not isinstance(x, Recorded):
        raise TypeError("the noise sampler was not given a recorded latent")
    if x.shape != x.tape.shape or x.dtype != x.tape.dtype or x.cell.count:
        raise x.tape.refuse("draws noise whose shape or dtype differs from the latent's")
    return x.tape


def _seed(tape: Tape, seed: Any) -> int:
    seed = number_of(seed) if not isinstance(seed, list | tuple) else None
    if not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed < 2**64:
        raise tape.refuse("draws noise without a seed, or with a seed for each picture")
    return seed


def _sigma(tape: Tape, sigma: Any) -> float:
    number = number_of(sigma)
    if number is None or not math.isfinite(number):
        raise tape.refuse("draws noise at a sigma that is not one finite number")
    return float(number)


def _source(tape: Tape, source: NoiseSource) -> NoiseSampler:
    tape.sources.append(source)
    number = len(tape.sources) - 1

    def sampler(sigma: Any, sigma_next: Any) -> Recorded:
        brownian = source.kind == "brownian"
        start, end = (_sigma(tape, level) if brownian else 0.0 for level in (sigma, sigma_next))
        if brownian and start == end:
            raise tape.refuse("draws noise for a step between two equal sigmas")
        return Recorded(tape, tape.draw(number, start, end), tape.shape, tape.dtype)

    return sampler
