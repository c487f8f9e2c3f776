"""What is ComfyUI's own code, or this pack's, and what another pack has put into an object or a class."""

from __future__ import annotations

import functools
import inspect
import os
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import comfy.samplers

COMFYUI = Path(comfy.samplers.__file__).parents[1]
OWN_CODE = tuple(
    f"{folder}{os.sep}" for folder in (COMFYUI / "comfy", COMFYUI / "comfy_extras", Path(__file__).parents[2])
)
"""Where the code is whose classes and functions are known: ComfyUI's, and this pack's."""

INSTALLED = tuple(f"{sysconfig.get_path(name)}{os.sep}" for name in ("stdlib", "purelib", "platlib"))
"""Folders of Python's own modules and of modules that pip installs."""

LIBRARIES = ("numpy", "scipy", "torchsde", "tqdm", "typing")
"""Libraries that ComfyUI's sampler functions call besides ComfyUI and torch."""


def foreign_class(kind: type) -> Iterator[str]:
    """What another pack has put into a class: itself, a class that it inherits from, or a function."""
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
    """A function as its author knows it."""
    return f"{getattr(function, '__module__', '?')}.{getattr(function, '__qualname__', type(function).__name__)}"


def own(value: Any) -> bool:
    """Whether this is nothing to be called, or ComfyUI's own or this pack's."""
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


def _own_module(module: Any) -> bool:
    """Whether a module is ComfyUI's, this pack's, torch's or Python's, or of the library whose layers ComfyUI's models have."""
    package = getattr(module, "__name__", "").partition(".")[0]
    return _comfyui(module) or package in ("torch", "einops", *sys.stdlib_module_names)


def _comfyui(module: Any) -> bool:
    return (getattr(module, "__file__", None) or "").startswith(OWN_CODE)
