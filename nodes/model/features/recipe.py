"""Recipes of the functions that ComfyUI's nodes put into a MODEL's options, from which workers rebuild the functions."""

from __future__ import annotations

import ast
import functools
import inspect
import sys
from collections.abc import Mapping
from pathlib import Path
from types import CellType, MappingProxyType, ModuleType
from typing import Any

from ....parallel_backend.diffusion import FunctionRecipe, ObjectRecipe
from ....parallel_backend.models.comfyui.features.recipe import codes_of, packed
from ..conditioning import is_plain
from ..own_code import COMFYUI, of_another_pack

PACKAGES = "comfy", "comfy_extras"

ABSENT = {"nodes", "server", "execution"}
"""ComfyUI's modules that workers do not have."""

MAX_DEPTH = 2
"""Largest depth of functions inside functions in a recipe."""


class RecipeReader:
    """A reader of recipes of the functions in a MODEL's options.

    Args:
        blocks: the paths of the model's modules, by `id`. Functions may hold these modules.
        remembered: a function that objects may remember, besides the function that is read. BlockSparseAttention's options
            remember the functions that they have set as attention.
    """

    def __init__(self, blocks: Mapping[int, str] = MappingProxyType({}), remembered: Any = None) -> None:
        self._blocks = blocks
        self._remembered = remembered
        self._objects: dict[str, Any] = {}

    def read(self, function: Any) -> FunctionRecipe | None:
        """Return the recipe of a function; None if workers cannot rebuild it.

        The function must be ComfyUI's own. It may hold plain values, functions and unchanged objects of ComfyUI's, blocks of
        the model, and functions that were made with it. Functions that hold an object under one name must hold the same object.
        """
        return self._read(function, self._remembered or function, 0)

    def _read(self, function: Any, remembered: Any, depth: int) -> FunctionRecipe | None:
        if depth > MAX_DEPTH or not is_importable(function):
            return None
        if (path := place_of(function)) is not None:
            package, _, name = path.partition(":")
            return FunctionRecipe(package, name)
        module = sys.modules[function.__module__]
        name = function.__qualname__
        if function.__kwdefaults__ or codes_of(module, name) != [function.__code__]:
            return None
        called = [vars(module)[used] for used in function.__code__.co_names if used in vars(module)]
        if any(callable(value) and of_another_pack(value) for value in called):
            return None
        variables = closure_of(function)
        if len(variables) < len(function.__code__.co_freevars) or not is_packable(function.__defaults__):
            return None
        values, functions, objects, blocks, inner = {}, {}, {}, {}, {}
        for variable, value in variables.items():
            if is_packable(value):
                values[variable] = packed(value)
            elif (path := place_of(value)) is not None:
                functions[variable] = path
            elif id(value) in self._blocks:
                blocks[variable] = self._blocks[id(value)]
            elif (recipe := self._read(value, remembered, depth + 1)) is not None:
                inner[variable] = recipe
            elif (instance := object_recipe(value, remembered)) is not None:
                if self._objects.setdefault(variable, value) is not value:
                    return None
                objects[variable] = instance
            else:
                return None
        defaults = packed(function.__defaults__)
        return FunctionRecipe(_module_of(function) or "", name, values, functions, objects, blocks, inner, defaults)


def closure_of(function: Any) -> dict[str, Any]:
    """Return the variables of a function's closure that have a value."""
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    return {name: cell.cell_contents for name, cell in cells if cell != CellType()}


def state_of(function: Any) -> dict[str, Any]:
    """Return the plain values in the closures of a function and of the functions that it holds."""
    state: dict[str, Any] = {}
    for name, value in closure_of(function).items():
        if is_packable(value):
            state[name] = packed(value)
        elif inspect.isfunction(value) and value is not function and "<locals>" in value.__qualname__:
            state[name] = state_of(value)
    return state


def is_packable(value: Any) -> bool:
    """Return True if a value is plain, or a collection of plain values."""
    try:
        packed(value)
    except TypeError:
        return False
    return True


def _module_of(function: Any) -> str | None:
    """Return the full name of a function's module; None unless it is a module of ComfyUI's that defines the function."""
    if not inspect.isfunction(function):
        return None
    module = sys.modules.get(function.__module__)
    file = Path(getattr(module, "__file__", None) or "")
    if function.__globals__ is not vars(module) or not file.is_relative_to(COMFYUI):
        return None
    parts = file.relative_to(COMFYUI).with_suffix("").parts
    return ".".join(parts) if parts[0] in PACKAGES else None


def is_importable(function: Any) -> bool:
    """Return True if workers can import a function's module. There `nodes` is this pack's package, and no server exists."""
    return _module_of(function) is not None and not _imported_by(sys.modules[function.__module__]) & ABSENT


@functools.cache
def _imported_by(module: ModuleType) -> frozenset[str]:
    """Return the top-level packages that a module imports."""
    tree = ast.parse(inspect.getsource(module))
    names = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and not node.level]
    return frozenset(name.partition(".")[0] for name in names)


def place_of(function: Any) -> str | None:
    """Return `module:name` of a module-level function in ComfyUI; None for anything else."""
    module = _module_of(function)
    if module is None or function.__globals__.get(function.__qualname__) is not function:
        return None
    return f"{module}:{function.__qualname__}"


def object_recipe(instance: Any, function: Any) -> ObjectRecipe | None:
    """Return the recipe that rebuilds an object of a ComfyUI class; None if the class would make a different object.

    The arguments for the class are the object's attributes of the same names. Besides these, an object may remember the
    attention functions that it has set.
    """
    path = _path_of_class(type(instance))
    if path is None:
        return None
    arguments = [name for name in inspect.signature(type(instance)).parameters if name in vars(instance)]
    values = {name: vars(instance)[name] for name in arguments}
    if not is_plain([*values.values()]):
        return None
    try:
        new = vars(type(instance)(**values))
    except Exception:  # its class may raise any error
        return None
    remaining = {
        name
        for name in {*new, *vars(instance)}
        if name not in arguments and not _remembers(vars(instance).get(name), function)
    }
    unchanged = all(name in new and same(new[name], vars(instance).get(name)) for name in (*arguments, *remaining))
    return ObjectRecipe(path, {name: packed(value) for name, value in values.items()}) if unchanged else None


def _remembers(value: Any, function: Any) -> bool:
    """Return True if a value is a set or list that holds only functions with the code of `function`."""
    return isinstance(value, (set, list)) and {getattr(member, "__code__", None) for member in value} == {
        function.__code__
    }


def same(first: Any, second: Any) -> bool:
    """Return True if two values can be compared and are equal."""
    try:
        return bool(first == second)
    except Exception:  # such as tensors of several values
        return False


def _path_of_class(kind: type) -> str | None:
    """Return `module:name` of a class in a ComfyUI module that workers can import; None for other classes."""
    methods = [value for value in vars(kind).values() if inspect.isfunction(value)]
    if kind.__bases__ != (object,) or not methods or not all(is_importable(method) for method in methods):
        return None
    path = f"{_module_of(methods[0])}:{kind.__qualname__}"
    module = sys.modules[kind.__module__]
    return path if vars(module).get(kind.__qualname__) is kind else None
