"""A declaration as data, and data as a declaration."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from types import MappingProxyType
from typing import Any

import msgspec

from ... import derived
from . import declaration, functions
from .declaration import Declaration

DATA: Mapping[str, type[derived.Word]] = MappingProxyType(
    {
        kind.__name__: kind
        for kind in vars(derived).values()
        if isinstance(kind, type) and issubclass(kind, derived.Word)
    }
)
WORDS: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {name: getattr(functions, name, None) or getattr(declaration, name) for name in DATA if name != "Word"}
)
"""The vocabulary's own, by the names that data has for them."""

PAIRS = ("streams", "arguments")
"""What a group has by names."""

SETS = ("references",)
"""What a declaration has in no order."""


def data_of(found: Declaration) -> derived.Declaration:
    """What can be kept and sent.

    Raises:
        ValueError: it says something that is no data.
    """
    try:
        return msgspec.convert(msgspec.to_builtins(_data(found)), type=derived.Declaration)
    except (TypeError, LookupError, msgspec.ValidationError) as error:
        raise ValueError(f"a declaration is no data: {error}") from None


def declaration_of(data: derived.Declaration) -> Declaration:
    """What a model is spread by."""
    found = _read(data)
    assert isinstance(found, Declaration)
    return found


def is_default(field: Field[Any], value: Any) -> bool:
    """Whether a field of a declaration has what it has when nothing is said of it."""
    if field.default is not MISSING:
        return bool(value is field.default or value == field.default)
    if field.default_factory is not MISSING:
        return bool(value == field.default_factory())
    return False


def _data(value: Any) -> Any:
    if isinstance(value, Mapping):
        return tuple((name, _data(each)) for name, each in value.items())
    if isinstance(value, tuple):
        return tuple(map(_data, value))
    if isinstance(value, frozenset):
        return tuple(sorted(value))
    if is_dataclass(value) and not isinstance(value, type):
        said = {each.name: getattr(value, each.name) for each in fields(value)}
        needed = {each.name for each in fields(value) if not is_default(each, said[each.name])}
        return DATA[type(value).__name__](**{name: _data(said[name]) for name in needed})
    return value


def _read(value: Any) -> Any:
    if isinstance(value, derived.Word):
        said = {name: _read(getattr(value, name)) for name in value.__struct_fields__}
        if isinstance(value, derived.Group):
            said |= {name: dict(said[name]) for name in PAIRS}
        if isinstance(value, derived.Declaration):
            said |= {name: frozenset(said[name]) for name in SETS}
        return WORDS[type(value).__name__](**{name: each for name, each in said.items() if each is not None})
    return tuple(map(_read, value)) if isinstance(value, tuple) else value
