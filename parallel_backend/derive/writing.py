"""Declarations as Python."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from ..models.spread import declaration
from ..models.spread.data import is_default
from ..models.spread.declaration import Declaration
from ..models.spread.functions import Chosen, Constant, LengthLess, StartAt

WIDTH = 120
"""Of lines of words."""

VOCABULARY = "from ..spread.declaration import "
FUNCTIONS = "from ..spread.functions import "


def source_of(name: str, found: Declaration, remarks: str) -> str:
    """A module of `models/declared/`; `remarks` are its docstring."""
    body = written(found, "")
    words = sorted(word for word in vars(declaration) if f"{word}(" in body)
    imports = f"from __future__ import annotations\n\n{VOCABULARY}{', '.join(words)}"
    if "Turns(" in body:
        imports += f"\n{FUNCTIONS}Turns"
    said = textwrap.fill(f'"""{remarks}"""', WIDTH)
    return f"{said}\n\n{imports}\n\n{name} = {body}\n"


def written(value: Any, indent: str) -> str:
    """An expression; what has its default is left out."""
    deeper = indent + "    "
    if isinstance(value, Constant):
        return f"lambda model: {value.value!r}"
    if isinstance(value, StartAt):
        return f"lambda length, picture: {value.place}"
    if isinstance(value, LengthLess):
        return f"lambda length, picture: {_end_less(value.multiple)}"
    if isinstance(value, Chosen):
        having, without = (written(each, deeper) for each in (value.having, value.without))
        return f"lambda block: {having} if {_quoted(value.mark)} in dict(block.named_modules()) else {without}"
    if is_dataclass(value) and not isinstance(value, type):
        keywords = [
            f"{each.name}={written(getattr(value, each.name), deeper)}"
            for each in fields(value)
            if not is_default(each, getattr(value, each.name))
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
    if isinstance(value, frozenset):
        return f"frozenset({written(tuple(sorted(value)), indent)})"
    return _quoted(value) if isinstance(value, str) else repr(value)


def _end_less(multiple: int) -> str:
    return "length - picture" if multiple == 1 else f"length - -(-picture // {multiple}) * {multiple}"


def _quoted(text: str) -> str:
    return json.dumps(text)


def _listed(opening: str, items: list[str], closing: str, indent: str) -> str:
    line = f"{opening}{', '.join(items)}{closing}"
    if len(line) + len(indent) < 90 and "\n" not in line:
        return line
    closing = closing.lstrip(",")
    return "\n".join([opening, *(f"{indent}    {item}," for item in items), f"{indent}{closing}"])
