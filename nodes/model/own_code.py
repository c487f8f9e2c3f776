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

from ...parallel_backend.models.comfyui.content.source_digests import LIBRARIES, FunctionWalk

COMFYUI = Path(comfy.samplers.__file__).parents[1]
OWN_CODE = tuple(
    f"{folder}{os.sep}" for folder in (COMFYUI / "comfy", COMFYUI / "comfy_extras", Path(__file__).parents[2])
)
"""The folders of ComfyUI's code and of this pack's."""

INSTALLED = tuple(f"{sysconfig.get_path(name)}{os.sep}" for name in ("stdlib", "purelib", "platlib"))
"""Folders of Python's own modules and of modules that pip installs."""


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
    if hasattr(value, "__wrapped__") and not _comfyui(module):  # a wrapper such as torch.no_grad
        return _own_module(module) and own(value.__wrapped__)
    return _own_module(module)


def of_another_pack(definition: Any) -> bool:
    """Return True if another pack defines a module, class or function: not ComfyUI, this pack or an installed library."""
    name = definition.__name__ if isinstance(definition, ModuleType) else getattr(definition, "__module__", None)
    if not name or name.partition(".")[0] in LIBRARIES:
        return False
    file = getattr(sys.modules.get(name), "__file__", None) or ""
    comfyuis = file.startswith(f"{COMFYUI}{os.sep}") and not file.startswith(f"{COMFYUI / 'custom_nodes'}{os.sep}")
    return not comfyuis and not file.startswith((*OWN_CODE, *INSTALLED))


def is_own_sampler(function: Callable[..., Any], options: Mapping[str, Any]) -> bool:
    """Return True if ComfyUI defines a sampler function, the functions among its options, and all that they call in ComfyUI."""
    members = [
        function,
        *(value for value in options.values() if not isinstance(value, bool | int | float | str | None)),
    ]
    return all(
        inspect.isfunction(member)
        and own(member)
        and not _all_code().reached_from(name_of(member), member, member.__module__).foreign
        for member in members
    )


@functools.cache
def _all_code() -> FunctionWalk:
    return FunctionWalk(COMFYUI, stops=())


def _own_module(module: Any) -> bool:
    """Return True if a module belongs to ComfyUI, this pack, torch, einops or Python."""
    package = getattr(module, "__name__", "").partition(".")[0]
    return _comfyui(module) or package in ("torch", "einops", *sys.stdlib_module_names)


def _comfyui(module: Any) -> bool:
    return (getattr(module, "__file__", None) or "").startswith(OWN_CODE)
