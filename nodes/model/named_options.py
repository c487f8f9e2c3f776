"""Which transformer_options a model's own code reads, by its source."""

from __future__ import annotations

import ast
import functools
import inspect
import sys
from collections.abc import Iterator
from types import ModuleType

from torch import nn

ASKING = ("get", "pop", "setdefault")
"""A dict's methods whose first argument is a key."""


def named_by(model: nn.Module) -> frozenset[str]:
    """The options that the modules of ComfyUI name in which a model's classes, and those they are made of, are written."""
    kinds = {base for part in model.modules() for base in type(part).__mro__}
    modules = {kind.__module__ for kind in kinds if kind.__module__.startswith("comfy.ldm.")}
    return frozenset().union(*(_named_in(sys.modules[module]) for module in modules))


@functools.cache
def _named_in(module: ModuleType) -> frozenset[str]:
    try:
        source = inspect.getsource(module)
    except OSError:  # it comes without
        return frozenset()
    return frozenset(_keys(ast.parse(source)))


def _keys(tree: ast.AST) -> Iterator[str]:
    """Yield the keys that code looks up in any object called options."""
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Attribute(value=where, attr=method), args=[ast.Constant(value=str(key)), *_]):
                is_lookup = method in ASKING
            case ast.Subscript(value=where, slice=ast.Constant(value=str(key)), ctx=ast.Load()):
                is_lookup = True
            case ast.Compare(left=ast.Constant(value=str(key)), ops=[ast.In() | ast.NotIn()], comparators=[where]):
                is_lookup = True
            case _:
                continue
        if is_lookup and "options" in ast.unparse(where):
            yield key
