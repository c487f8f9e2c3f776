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
    return made_again(importlib.import_module(f"comfy_extras.{module_name}"), function, values)


def made_again(
    module: ModuleType, function: str, values: Mapping[str, Any], defaults: tuple[Any, ...] | None = None
) -> Any:
    """The function that a method of a module's class makes, by its qualified name.

    Args:
        values: what it takes from the method.
        defaults: of its arguments.
    """
    owner, method, _, name = function.split(".")
    found = inspect.getattr_static(vars(module)[owner], method)
    made_by = inspect.unwrap(getattr(found, "__func__", found))
    (code,) = (each for each in made_by.__code__.co_consts if isinstance(each, CodeType) and each.co_name == name)
    cells = tuple(CellType(values[variable]) for variable in code.co_freevars)
    return FunctionType(code, vars(module), name, defaults, cells)
