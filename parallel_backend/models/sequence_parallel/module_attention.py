"""Replacement of a module's `optimized_attention` while a block runs, and the arguments that a block's source passes to it."""

from __future__ import annotations

import ast
import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from ...declaration import Attention, ReplicatedKeys
from ...errors import Refused
from ...source_code import definitions, parse
from .attentions import CHANGES_NOTHING, Attentions, unknown
from .compiled import OVERRIDE

NAME = "optimized_attention"

OPERANDS = frozenset(inspect.signature(Attentions.__call__).parameters)
"""The names of the arguments that `Attentions.__call__` declares."""


@contextmanager
def answered(module: str, attentions: Callable[..., Tensor]) -> Iterator[None]:
    """Replace the attention of a ComfyUI module by `attentions` while this context is active. "" stands for no module.

    The replacement is for modules that do not pass the run's transformer_options to attention.

    Raises:
        Refused: the module calls attention by another name.
    """
    if not module:
        yield
        return
    source_module = sys.modules[module]
    own = getattr(source_module, NAME, None)
    if own is None:
        raise Refused(
            f"the model's {module} has no {NAME}: this ComfyUI is newer or older than this pack knows; update the pack, or use "
            "Load Diffusion Model."
        )

    def call(*args: Any, transformer_options: Mapping[str, Any] | None = None, **kwargs: Any) -> Tensor:
        return own(*args, transformer_options={OVERRIDE: attentions, **(transformer_options or {})}, **kwargs)

    setattr(source_module, NAME, call)
    try:
        yield
    finally:
        setattr(source_module, NAME, own)


def unknown_arguments(block: nn.Module, attentions: Sequence[Attention]) -> list[str]:
    """Return the names of unsupported arguments that each call of attention in a block's source passes.

    Our kernels do not support these arguments. The list is empty if no attention needs our kernels. An argument that some call
    lacks is not in the list, because only a run shows which call needs our kernels.
    """
    if all(isinstance(attention, ReplicatedKeys) for attention in attentions):
        return []
    calls = [names for kind in set(map(type, block.modules())) for names in _calls(kind)]
    return sorted(set.intersection(*map(set, calls))) if calls else []


def _calls(kind: type) -> Sequence[Sequence[str]]:
    """Return the names of arguments that our kernels do not support, for each call of attention in a class's source."""
    return _calls_in(kind.__module__).get(kind.__qualname__, ())  # none for a class that is made at run time


@functools.cache
def _calls_in(name: str) -> Mapping[str, Sequence[Sequence[str]]]:
    """Return the result of `_calls` for each class in a module's source, by qualified name.

    Names of ComfyUI's own function, which calls ours, are left out: the function may not pass them on.
    """
    module = sys.modules[name]
    tree = parse(getattr(module, "__file__", None), mentioned=NAME) or ast.Module([], [])
    code = getattr(getattr(module, NAME, None), "__code__", None)
    known_names = {*code.co_consts, *code.co_varnames} if code else set()
    return {
        kind: [
            [argument for argument in _unknown(node) if argument not in known_names]
            for node in ast.walk(bodies[-1])
            if isinstance(node, ast.Call) and _name(node.func) == NAME
        ]
        for kind, bodies in definitions(tree).items()
    }


def _unknown(call: ast.Call) -> Iterator[str]:
    for keyword in call.keywords:
        if keyword.arg is not None and keyword.arg not in OPERANDS:
            yield from unknown({keyword.arg: _value(keyword.arg, keyword.value)})


def _value(name: str, node: ast.expr) -> Any:
    """Return the value of a constant expression. For other expressions, return a value that our kernels support, if any."""
    try:
        return ast.literal_eval(node)
    except ValueError:
        return next(iter(CHANGES_NOTHING.get(name, ())), None)


def _name(called: ast.expr) -> str:
    return called.id if isinstance(called, ast.Name) else called.attr if isinstance(called, ast.Attribute) else ""
