"""Which sampler functions are ComfyUI's own, and which of their parts another pack has replaced."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any

from ..own_code import LIBRARIES, own
from .snapshot import names_in


def is_comfyuis(function: Callable[..., Any], options: Mapping[str, Any]) -> bool:
    """Return True if ComfyUI or this pack defines a function, the functions among its options, and everything that they
    call there.
    """
    functions = [function, *(value for value in options.values() if callable(value))]
    if any(
        not isinstance(value, bool | int | float | str | None) and not callable(value) for value in options.values()
    ):
        return False
    return all(
        inspect.isfunction(member) and own(member) and next(_changed(member), None) is None for member in functions
    )


def _changed(function: Callable[..., Any]) -> Iterator[str]:
    """The names of what is not ComfyUI's own of all that one of its functions calls there."""
    waiting, seen = [inspect.unwrap(function)], set()
    while waiting:
        code, names = waiting[-1].__code__, waiting.pop().__globals__
        used = {*names_in(code)}
        spaces = [
            names,
            *(vars(names[n]) for n in used if isinstance(names.get(n), ModuleType) and _comfyuis(names[n])),
        ]
        for space in spaces:
            for name in used & space.keys():
                value = space[name]
                if id(value) in seen or isinstance(value, ModuleType):
                    continue
                seen.add(id(value))
                parts = vars(value).values() if isinstance(value, type) else [value]
                for part in parts:
                    if not own(part) and getattr(part, "__module__", "").partition(".")[0] not in LIBRARIES:
                        yield name
                    elif inspect.isfunction(part) and _comfyuis(inspect.getmodule(part)):
                        waiting.append(inspect.unwrap(part))


def _comfyuis(module: Any) -> bool:
    """Whether a module holds samplers of ComfyUI's."""
    return getattr(module, "__name__", "").startswith(("comfy.k_diffusion", "comfy.extra_samplers", "comfy.samplers"))
