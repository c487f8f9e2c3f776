"""The code of a ComfyUI model: its classes, their files, and the transformer options that they read."""

from __future__ import annotations

import ast
import functools
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType

from torch import nn

from ....source_code import parse
from .files import file_digest

MODELS = "comfy.ldm."
"""The package of ComfyUI's model classes and their building blocks."""

AROUND = ("comfy/ldm/modules/attention.py", "comfy/model_base.py", "comfy/ops.py")
"""Files that take part in every model's forward."""

LOOKUPS = ("get", "pop", "setdefault")
"""Methods of a dict whose first argument is a key."""


def classes_of(model: nn.Module) -> frozenset[type]:
    """Return the classes of a module and of all modules in it."""
    return frozenset(type(submodule) for submodule in model.modules())


def sources_of(model: nn.Module, folder: Path) -> tuple[tuple[str, str], ...]:
    """Return the paths and digests of the files that a model depends on.

    These are the files of its classes, of all that they use under `comfy.ldm`, and the files of every model's forward.

    Args:
        model: a diffusion model, on any device.
        folder: ComfyUI's folder.
    """
    paths = {path for name in _reached(_modules_of(model)) if (path := _path(name, folder))} | {*AROUND}
    return tuple((path, file_digest(folder / path)) for path in sorted(paths))


def options_read_by(model: nn.Module) -> frozenset[str]:
    """Return the transformer options that are named in the modules of a model's classes."""
    return frozenset().union(*(_options_in(getattr(sys.modules[name], "__file__", "")) for name in _modules_of(model)))


def _modules_of(model: nn.Module) -> set[str]:
    """Return the modules under `comfy.ldm` that define a model's classes and the classes that these inherit from."""
    return {
        base.__module__ for kind in classes_of(model) for base in kind.__mro__ if base.__module__.startswith(MODELS)
    }


def _reached(names: Iterable[str]) -> set[str]:
    reached, waiting = set(names), [*names]
    while waiting:
        module = sys.modules.get(waiting.pop())
        more = {*_used(module)} - reached if module is not None and module.__name__.startswith(MODELS) else set()
        reached |= more
        waiting += more
    return reached


def _used(module: ModuleType) -> Iterator[str]:
    for value in [*vars(module).values()]:
        name = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
        if isinstance(name, str) and name.startswith(MODELS):
            yield name


def _path(name: str, folder: Path) -> str:
    file = getattr(sys.modules.get(name), "__file__", None)
    return Path(file).relative_to(folder).as_posix() if file and file.startswith(f"{folder}/") else ""


@functools.cache
def _options_in(file: str) -> frozenset[str]:
    """Return the keys that a file's code looks up in any object whose expression contains "options"."""
    return frozenset(
        key
        for node in ast.walk(parse(file) or ast.Module([], []))
        for key, where in _lookup(node)
        if "options" in where
    )


def _lookup(node: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield the key that a node looks up in an object, and the object's expression."""
    match node:
        case ast.Call(func=ast.Attribute(value=where, attr=method), args=[ast.Constant(value=str(key)), *_]):
            if method in LOOKUPS:
                yield key, ast.unparse(where)
        case ast.Subscript(value=where, slice=ast.Constant(value=str(key)), ctx=ast.Load()):
            yield key, ast.unparse(where)
        case ast.Compare(left=ast.Constant(value=str(key)), ops=[ast.In() | ast.NotIn()], comparators=[where]):
            yield key, ast.unparse(where)
