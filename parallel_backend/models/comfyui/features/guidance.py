"""The functions of ComfyUI's guidance nodes in a worker: made of ComfyUI's own code, without the node."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from types import CellType, CodeType, FunctionType, ModuleType
from typing import Any

from ....diffusion import GuidanceFunction
from ..importing import import_comfyui


def guidance_function(known: GuidanceFunction) -> Any:
    """The function that the node of a MODEL would have made with these values."""
    return function_of(known.module, known.function, known.values)


def function_of(module_name: str, function: str, values: Mapping[str, Any]) -> Any:
    """The function of a node of comfy_extras by its qualified name, with these values for what it takes from the node."""
    import_comfyui()
    return rebuilt_function(importlib.import_module(f"comfy_extras.{module_name}"), function, values)


def rebuilt_function(
    module: ModuleType, function: str, values: Mapping[str, Any], defaults: tuple[Any, ...] | None = None
) -> Any:
    """The function that a module's function, or a method of a class of its, makes, by its qualified name.

    Args:
        values: what it takes from what makes it.
        defaults: of its arguments.
    """
    (code,) = codes_of(module, function)
    name = function.rpartition(".")[2]
    cells = tuple(CellType(values[variable]) for variable in code.co_freevars)
    return FunctionType(code, vars(module), name, defaults, cells)


def codes_of(module: ModuleType, function: str) -> list[CodeType]:
    """The code of a function that another one makes, by its qualified name: one, or none where the module makes no such."""
    owner, *method, _, name = function.split(".")
    owner_object = vars(module).get(owner)
    if method and owner_object is not None:
        owner_object = inspect.getattr_static(owner_object, method[0], None)
    maker = getattr(owner_object, "__func__", owner_object)
    code = getattr(inspect.unwrap(maker) if callable(maker) else None, "__code__", None)
    constants = code.co_consts if code is not None else ()
    return [each for each in constants if isinstance(each, CodeType) and each.co_name == name]
