"""A function that a node of ComfyUI's puts in attention's place, in a worker: made of ComfyUI's own code, without the node."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ....conditioning import ATTENTION_OVERRIDE, OPTIONS, arguments
from ....diffusion import Value
from ...sequence_parallel.function_override import Function, OfHeads
from ..importing import import_comfyui
from .guidance import rebuilt_function


@dataclass(frozen=True)
class ObjectRecipe:
    """An object that a function holds: its class in ComfyUI, as `module:name`, and what it was made with."""

    place: str
    values: Mapping[str, Any]

    def make(self) -> Any:
        """The object, as new."""
        return named(self.place)(**self.values)


@dataclass(frozen=True)
class OverrideRecipe:
    """What a worker needs to make the function again.

    Attributes:
        module: of ComfyUI's, by its full name.
        function: its qualified name there; one that a method makes has `<locals>` in it.
        values: the plain ones that it takes from the method.
        functions: those of ComfyUI's that it takes from there, as `module:name`.
        objects: those of ComfyUI's classes that it takes from there.
        defaults: plain ones, of its arguments.
        by_head: the names of values, lists, that have an entry for each head.
    """

    module: str
    function: str
    values: Mapping[str, Any]
    functions: Mapping[str, str]
    objects: Mapping[str, ObjectRecipe]
    defaults: tuple[Any, ...]
    by_head: tuple[str, ...]

    def of_heads(self, run: slice, objects: Mapping[str, Any]) -> Function:
        """The function for some heads, with what it holds for each cut to these, and these objects."""
        import_comfyui()
        module = importlib.import_module(self.module)
        if "<locals>" not in self.function:
            return vars(module)[self.function]  # type: ignore[no-any-return]
        values = {name: value[run] if name in self.by_head else value for name, value in self.values.items()}
        functions = {name: named(path) for name, path in self.functions.items()}
        return rebuilt_function(module, self.function, {**values, **functions, **objects}, self.defaults or None)  # type: ignore[no-any-return]

    def made(self) -> dict[str, Any]:
        """The objects, as new."""
        import_comfyui()
        return {name: each.make() for name, each in self.objects.items()}


def override_in(values: Mapping[str, Value]) -> OfHeads | None:
    """The function that goes with a call's values; None where there is none."""
    prefix = f"{OPTIONS}.{ATTENTION_OVERRIDE}."
    own = {name: value for name, value in values.items() if name.startswith(prefix)}
    if not own:
        return None
    fields = arguments({}, own)[OPTIONS][ATTENTION_OVERRIDE]
    empty: dict[str, Any] = {"values": {}, "functions": {}, "defaults": (), "by_head": ()}
    objects = {name: ObjectRecipe(**{"values": {}, **each}) for name, each in fields.pop("objects", {}).items()}
    recipe = OverrideRecipe(**{**empty, **fields, "objects": objects})
    built_objects = recipe.made()

    @functools.lru_cache(maxsize=8)
    def cached_function(start: int | None, stop: int | None, heads: int) -> Function:
        return recipe.of_heads(slice(start, stop), built_objects)

    return lambda run, heads: cached_function(run.start, run.stop, heads)


def named(path: str) -> Any:
    """What a module has under a name, both from `module:name`."""
    module, _, name = path.partition(":")
    return vars(importlib.import_module(module))[name]
