"""Functions of ComfyUI's nodes that a worker rebuilds from recipes, with ComfyUI's own code and without the nodes."""

from __future__ import annotations

import importlib
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from types import CellType, CodeType, FunctionType, MappingProxyType, ModuleType
from typing import Any

import msgspec
from torch import Tensor

from ....diffusion import FunctionRecipe, ObjectRecipe
from ..importing import import_comfyui

COLLECTIONS: Mapping[str, Callable[[list[Any]], Any]] = MappingProxyType(
    {
        "list": list,
        "tuple": tuple,
        "set": set,
        "frozenset": frozenset,
        "dict": dict,
        "float": lambda items: float(items[0]),
    }
)
"""Functions that make a value from the items of its packed form, by the kind that begins the packed form."""


TENSOR = "tensor"
"""The kind of a packed tensor, which is followed by the tensor's name."""


def packed(value: Any, tensors: dict[str, Tensor] | None = None) -> Any:
    """Return a plain value in a form for JSON: numbers, texts and None unchanged, collections as [kind, *items].

    Args:
        tensors: receives the tensors in the value; None if it must not have tensors.

    Raises:
        TypeError: the value, or an item of it, is not plain.
    """
    if isinstance(value, Tensor) and tensors is not None:
        tensors[name := str(len(tensors))] = value
        return [TENSOR, name]
    if isinstance(value, float) and not math.isfinite(value):
        return ["float", str(value)]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, dict):
        return ["dict", *(["tuple", packed(key), packed(item, tensors)] for key, item in value.items())]
    if isinstance(value, set | frozenset):
        return [type(value).__name__, *(packed(item, tensors) for item in sorted(value, key=repr))]
    if isinstance(value, list | tuple):
        return ["list" if isinstance(value, list) else "tuple", *(packed(item, tensors) for item in value)]
    raise TypeError(f"a {type(value).__name__} is no plain value")


def unpacked(value: Any, tensors: Mapping[str, Tensor] = MappingProxyType({})) -> Any:
    """Return the value that was packed, with its tensors by name."""
    if not isinstance(value, list):
        return value
    kind, *items = value
    if kind == TENSOR:
        return tensors[items[0]]
    return COLLECTIONS[kind]([unpacked(item, tensors) for item in items])


def encoded(recipes: Sequence[FunctionRecipe]) -> str:
    """Return recipes as a text, which is sent among the values of a call."""
    return msgspec.json.encode(recipes).decode()


def decoded(text: str) -> list[FunctionRecipe]:
    """Return the recipes in a text.

    Raises:
        msgspec.ValidationError: the text does not hold recipes.
    """
    return msgspec.json.decode(text, type=list[FunctionRecipe])


def object_from(recipe: ObjectRecipe) -> Any:
    """Return a new object of a recipe's class."""
    import_comfyui()
    return named(recipe.kind)(**{name: unpacked(value) for name, value in recipe.values.items()})


def objects_from(recipes: Sequence[FunctionRecipe]) -> dict[str, Any]:
    """Return new objects for all objects that functions hold, by name."""
    objects: dict[str, Any] = {}
    for recipe in recipes:
        objects |= objects_from([*recipe.inner.values()])
        objects |= {name: object_from(each) for name, each in recipe.objects.items()}
    return objects


def function_from(
    recipe: FunctionRecipe,
    objects: Mapping[str, Any] | None = None,
    heads: slice = slice(None),
    block_at: Callable[[str], Any] | None = None,
) -> Any:
    """Return the function of a recipe.

    Args:
        objects: the objects that the function holds; by default new objects.
        heads: the heads that the function is for. Lists with an entry for each head are cut to these.
        block_at: returns the block at a path in the form that the function may use.
    """
    import_comfyui()
    module = importlib.import_module(recipe.module)
    if "<locals>" not in recipe.function:
        return vars(module)[recipe.function]
    objects = objects_from([recipe]) if objects is None else objects
    variables = {name: unpacked(value) for name, value in recipe.values.items()}
    variables |= {name: variables[name][heads] for name in recipe.by_head}
    variables |= {name: named(path) for name, path in recipe.functions.items()}
    variables |= {name: objects[name] for name in recipe.objects}
    variables |= {name: function_from(inner, objects, heads, block_at) for name, inner in recipe.inner.items()}
    if block_at is not None:
        variables |= {name: block_at(path) for name, path in recipe.blocks.items()}
    (code,) = codes_of(module, recipe.function)
    cells = tuple(CellType(variables[name]) for name in code.co_freevars)
    function = FunctionType(code, vars(module), code.co_name, unpacked(recipe.defaults), cells)
    function.__qualname__ = recipe.function
    return function


def named(path: str) -> Any:
    """Return the object with a name in a module, given `module:name`."""
    module, _, name = path.partition(":")
    return vars(importlib.import_module(module))[name]


def codes_of(module: ModuleType, function: str) -> list[CodeType]:
    """Return the code of a function that another function makes, by its qualified name.

    The list has several codes if the other function makes several functions of this name, and none if it makes none.
    """
    owner, *method, _, name = function.split(".")
    owner_object = vars(module).get(owner)
    if method and owner_object is not None:
        owner_object = inspect.getattr_static(owner_object, method[0], None)
    maker = getattr(owner_object, "__func__", owner_object)
    code = getattr(inspect.unwrap(maker) if callable(maker) else None, "__code__", None)
    constants = code.co_consts if code is not None else ()
    return [each for each in constants if isinstance(each, CodeType) and each.co_name == name]
