"""The functions of ComfyUI's guidance nodes in a worker: made of ComfyUI's own code, without the node."""

from __future__ import annotations

import importlib
import inspect
from types import CellType, CodeType, FunctionType
from typing import Any

from ....diffusion import GuideFunction
from ..importing import import_comfyui


def guide_function(guide: GuideFunction) -> Any:
    """The function that the node of a MODEL would have made with these values."""
    import_comfyui()
    module = importlib.import_module(f"comfy_extras.{guide.module}")
    owner, method, _, name = guide.function.split(".")
    made_by = inspect.unwrap(inspect.getattr_static(vars(module)[owner], method).__func__)
    (code,) = (each for each in made_by.__code__.co_consts if isinstance(each, CodeType) and each.co_name == name)
    cells = tuple(CellType(guide.values[variable]) for variable in code.co_freevars)
    return FunctionType(code, vars(module), name, None, cells)
