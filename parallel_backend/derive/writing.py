"""Declarations as Python."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from typing import Any

from torch import nn

from ..models.spread import declaration
from ..models.spread.declaration import Attention, Declaration

WIDTH = 120
"""Of lines of words."""

VOCABULARY = "from ..spread.declaration import "
PACKAGE = str(__package__).replace(".derive", ".models.declared")


class Written:
    """A function, and how it is written."""

    def __init__(self, source: str) -> None:
        self.source = source
        self._function = eval(source, {})

    def __call__(self, *args: Any) -> Any:
        """What it gives."""
        return self._function(*args)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Written) and self.source == other.source

    def __hash__(self) -> int:
        return hash(self.source)


@dataclass(frozen=True)
class Chosen:
    """The attentions of a block: one kind's where it has a submodule of this name, else the other's."""

    mark: str
    having: tuple[Attention, ...]
    without: tuple[Attention, ...]

    def __call__(self, block: nn.Module) -> tuple[Attention, ...]:
        """Those of one block."""
        return self.having if self.mark in dict(block.named_modules()) else self.without


def constant(value: Any) -> Written:
    """A function of the model or block that gives the same for all."""
    return Written(f"lambda model: {value!r}")


def source_of(name: str, found: Declaration, remarks: str) -> str:
    """A module of `models/declared/`; `remarks` are its docstring."""
    body = written(found, "")
    words = sorted(word for word in vars(declaration) if f"{word}(" in body)
    imports = f"from __future__ import annotations\n\n{VOCABULARY}{', '.join(words)}"
    said = textwrap.fill(f'"""{remarks}"""', WIDTH)
    return f"{said}\n\n{imports}\n\n{name} = {body}\n"


def read(name: str, source: str) -> Declaration:
    """What a module says, as if it lay in `models/declared/`."""
    space: dict[str, Any] = {"__package__": PACKAGE, "__name__": f"{PACKAGE}.derived"}
    exec(compile(source, "<derived>", "exec", dont_inherit=True), space)
    found = space[name]
    assert isinstance(found, Declaration)
    return found


def written(value: Any, indent: str) -> str:
    """An expression; what has its default is left out."""
    deeper = indent + "    "
    if isinstance(value, Written):
        return value.source
    if isinstance(value, Chosen):
        having, without = (written(each, deeper) for each in (value.having, value.without))
        return f"lambda block: {having} if {_quoted(value.mark)} in dict(block.named_modules()) else {without}"
    if is_dataclass(value) and not isinstance(value, type):
        keywords = [
            f"{each.name}={written(getattr(value, each.name), deeper)}"
            for each in fields(value)
            if not _is_default(each, getattr(value, each.name))
        ]
        if not keywords:
            return f"{type(value).__name__}()"
        return _listed(f"{type(value).__name__}(", keywords, ")", indent)
    if isinstance(value, Mapping):
        return _listed(
            "{", [f"{written(key, deeper)}: {written(each, deeper)}" for key, each in value.items()], "}", indent
        )
    if isinstance(value, tuple):
        items = [written(each, deeper) for each in value]
        return _listed("(", items, ",)" if len(items) == 1 else ")", indent)
    return _quoted(value) if isinstance(value, str) else repr(value)


def _quoted(text: str) -> str:
    return json.dumps(text)


def _listed(opening: str, items: list[str], closing: str, indent: str) -> str:
    line = f"{opening}{', '.join(items)}{closing}"
    if len(line) + len(indent) < 90 and "\n" not in line:
        return line
    closing = closing.lstrip(",")
    return "\n".join([opening, *(f"{indent}    {item}," for item in items), f"{indent}{closing}"])


def _is_default(field: Any, value: Any) -> bool:
    if field.default is not MISSING:
        return bool(value is field.default or value == field.default)
    if field.default_factory is not MISSING:
        return bool(value == field.default_factory())
    return False
