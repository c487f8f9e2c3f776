"""Writes declarations as Python source."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping
from typing import Any

from msgspec import NODEFAULT
from msgspec.structs import FieldInfo, fields

from .. import declaration
from ..declaration import Declaration, DeclarationPart

WIDTH = 120
"""Width of docstring lines."""

VOCABULARY = "from ...declaration import "


def source_of(name: str, written_declaration: Declaration, remarks: str) -> str:
    """Return the source of a module for `models/declared/`, with `remarks` as its docstring."""
    body = written(written_declaration, "")
    names = sorted(part for part in vars(declaration) if f"{part}(" in body)
    imports = f"from __future__ import annotations\n\n{VOCABULARY}{', '.join(names)}"
    docstring = textwrap.fill(f'"""{remarks}"""', WIDTH)
    return f"{docstring}\n\n{imports}\n\n{name} = {body}\n"


def written(value: Any, indent: str) -> str:
    """Return a value as a Python expression. Fields with their default value are left out."""
    deeper = indent + "    "
    if isinstance(value, DeclarationPart):
        keywords = [
            f"{item.name}={written(getattr(value, item.name), deeper)}"
            for item in fields(value)
            if not is_default(item, getattr(value, item.name))
        ]
        if not keywords:
            return f"{type(value).__name__}()"
        return _listed(f"{type(value).__name__}(", keywords, ")", indent)
    if isinstance(value, Mapping):
        return _listed(
            "{", [f"{written(key, deeper)}: {written(item, deeper)}" for key, item in value.items()], "}", indent
        )
    if isinstance(value, tuple):
        items = [written(item, deeper) for item in value]
        return _listed("(", items, ",)" if len(items) == 1 else ")", indent)
    if isinstance(value, frozenset):
        return f"frozenset({written(tuple(sorted(value)), indent)})"
    return _quoted(value) if isinstance(value, str) else repr(value)


def is_default(field: FieldInfo, value: Any) -> bool:
    """Return true if a field of a declaration has its default value."""
    default = field.default if field.default_factory is NODEFAULT else field.default_factory()
    return bool(value is default or value == default)


def _quoted(text: str) -> str:
    return json.dumps(text)


def _listed(opening: str, items: list[str], closing: str, indent: str) -> str:
    line = f"{opening}{', '.join(items)}{closing}"
    if len(line) + len(indent) < 90 and "\n" not in line:
        return line
    closing = closing.lstrip(",")
    return "\n".join([opening, *(f"{indent}    {item}," for item in items), f"{indent}{closing}"])
