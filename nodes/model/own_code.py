"""The owner of code: ComfyUI and this pack, a library, or another pack that has changed an object, class or function."""

from __future__ import annotations

import functools
import inspect
import os
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import comfy.samplers

from ...parallel_backend.source_code import names_in

COMFYUI = Path(comfy.samplers.__file__).parents[1]
OWN_CODE = tuple(
    f"{folder}{os.sep}" for folder in (COMFYUI / "comfy", COMFYUI / "comfy_extras", Path(__file__).parents[2])
)
"""The folders of ComfyUI's code and of this pack's."""

INSTALLED = tuple(f"{sysconfig.get_path(name)}{os.sep}" for name in ("stdlib", "purelib", "platlib"))
"""Folders of Python's own modules and of modules that pip installs."""

LIBRARIES = ("numpy", "scipy", "torchsde", "tqdm", "typing")
"""Libraries that ComfyUI's sampler functions call besides ComfyUI and torch."""


def foreign_class(kind: type) -> Iterator[str]:
    """Yield another pack's changes to a class, in words: the class itself, a class that it inherits from, or a method."""
    for base in inspect.getmro(kind):
        if not _own_module(sys.modules.get(base.__module__)):
            yield f"the class {base.__name__}"
        elif not base.__module__.startswith("torch"):
            yield from (f"{name} of another pack" for name, value in vars(base).items() if not own(value))


def is_own_method(instance: Any, name: str) -> bool:
    """Return True if an object's attribute is its class's own method, restored after a replacement."""
    value = vars(instance)[name]
    return (
        inspect.ismethod(value) and value.__self__ is instance and value.__func__ is getattr(type(instance), name, None)
    )


def foreign(instance: Any, what: str) -> Iterator[str]:
    """Yield another pack's changes to an object's class or methods, in words."""
    yield from (f"{name} in the {what}" for name in foreign_class(type(instance)))
    for name in vars(instance):
        if callable(getattr(type(instance), name, None)) and not is_own_method(instance, name):
            yield f"a {what} with its own {name}"


def name_of(function: Any) -> str:
    """Return a function's name with its module."""
    return f"{getattr(function, '__module__', '?')}.{getattr(function, '__qualname__', type(function).__name__)}"


def own(value: Any) -> bool:
    """Return True if ComfyUI, this pack, torch or Python defines a function. Other objects that cannot be called count too."""
    if isinstance(value, (staticmethod, classmethod)) or inspect.ismethod(value):
        value = value.__func__
    while isinstance(value, functools.partial):
        value = value.func
    if not inspect.isfunction(value):
        return not callable(value) or isinstance(value, type) or inspect.isroutine(value)
    module = sys.modules.get(value.__globals__["__name__"])
    if hasattr(value, "__wrapped__") and not _comfyui(module):  # such as torch.no_grad around it
        return _own_module(module) and own(value.__wrapped__)
    return _own_module(module)


def of_another_pack(definition: Any) -> bool:
    """Return True if another pack defines a module, class or function: not ComfyUI, this pack or an installed library."""
    name = definition.__name__ if isinstance(definition, ModuleType) else getattr(definition, "__module__", None)
    if not name or name.partition(".")[0] in (*LIBRARIES, "torch", "einops", *sys.stdlib_module_names):
        return False
    file = getattr(sys.modules.get(name), "__file__", None) or ""
    comfyuis = file.startswith(f"{COMFYUI}{os.sep}") and not file.startswith(f"{COMFYUI / 'custom_nodes'}{os.sep}")
    return not comfyuis and not file.startswith((*OWN_CODE, *INSTALLED))


def is_own_sampler(function: Callable[..., Any], options: Mapping[str, Any]) -> bool:
    """Return True if ComfyUI or this pack defines a function, the functions among its options, and everything that they
    call there.
    """
    functions = [function, *(value for value in options.values() if callable(value))]
    if any(
        not isinstance(value, bool | int | float | str | None) and not callable(value) for value in options.values()
    ):
        return False
    return all(
        inspect.isfunction(member) and own(member) and next(_foreign_names(member), None) is None
        for member in functions
    )


def _foreign_names(function: Callable[..., Any]) -> Iterator[str]:
    """Yield the names that a sampler function reaches in ComfyUI's sampler modules and that another pack has bound."""
    waiting, seen = [inspect.unwrap(function)], set()
    while waiting:
        code, names = waiting[-1].__code__, waiting.pop().__globals__
        used = names_in(code)
        spaces = [
            names,
            *(vars(names[n]) for n in used if isinstance(names.get(n), ModuleType) and _has_samplers(names[n])),
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
                    elif inspect.isfunction(part) and _has_samplers(inspect.getmodule(part)):
                        waiting.append(inspect.unwrap(part))


def _has_samplers(module: Any) -> bool:
    """Return True if a module is one of ComfyUI's that hold samplers."""
    return getattr(module, "__name__", "").startswith(("comfy.k_diffusion", "comfy.extra_samplers", "comfy.samplers"))


def _own_module(module: Any) -> bool:
    """Return True if a module belongs to ComfyUI, this pack, torch, einops or Python."""
    package = getattr(module, "__name__", "").partition(".")[0]
    return _comfyui(module) or package in ("torch", "einops", *sys.stdlib_module_names)


def _comfyui(module: Any) -> bool:
    return (getattr(module, "__file__", None) or "").startswith(OWN_CODE)
