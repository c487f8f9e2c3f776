"""What the source of a block's classes gives attention, known before a block has run."""

from __future__ import annotations

import ast
import functools
import inspect
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

from ...declaration import Attention, ReplicatedKeys
from ...source_code import definitions, parse
from .attentions import CHANGES_NOTHING, Attentions, unknown
from .module_attention import NAME

OPERANDS = frozenset(inspect.signature(Attentions.__call__).parameters)
"""The arguments that our attention names itself."""


def unknown_arguments(block: nn.Module, attentions: Sequence[Attention]) -> list[str]:
    """What each call of attention in a block's classes is given and our kernels do not know, by name.

    Empty where no call needs our kernels, or some call is without it: which one is which, only a run shows.
    """
    if all(isinstance(attention, ReplicatedKeys) for attention in attentions):
        return []
    calls = [names for kind in set(map(type, block.modules())) for names in _calls(kind)]
    return sorted(set.intersection(*map(set, calls))) if calls else []


@functools.cache
def _calls(kind: type) -> tuple[tuple[str, ...], ...]:
    """For each call of attention in a class's source what our kernels do not know of its arguments.

    Less what ComfyUI's function, which finds ours, has a name for: it may keep that to itself.
    """
    module = sys.modules[kind.__module__]
    tree = parse(getattr(module, "__file__", None)) or ast.Module([], [])
    body = definitions(tree).get(kind.__qualname__, ())[-1:]  # none if the program makes the class, or it is built in
    calls = (
        node for each in body for node in ast.walk(each) if isinstance(node, ast.Call) and _name(node.func) == NAME
    )
    code = getattr(getattr(module, NAME, None), "__code__", None)
    known_names = {*code.co_consts, *code.co_varnames} if code else set()
    return tuple(tuple(name for name in _unknown(call) if name not in known_names) for call in calls)


def _unknown(call: ast.Call) -> Iterator[str]:
    for keyword in call.keywords:
        if keyword.arg is not None and keyword.arg not in OPERANDS:
            yield from unknown({keyword.arg: _value(keyword.arg, keyword.value)})


def _value(name: str, node: ast.expr) -> Any:
    """What a constant is; for what only a run shows, a value that is known, if any is."""
    try:
        return ast.literal_eval(node)
    except ValueError:
        return next(iter(CHANGES_NOTHING.get(name, ())), None)


def _name(called: ast.expr) -> str:
    return called.id if isinstance(called, ast.Name) else called.attr if isinstance(called, ast.Attribute) else ""
