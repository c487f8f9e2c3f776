"""Lookup of what the plan command knows by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from ...errors import Refused

Entry = TypeVar("Entry")


def looked_up(kind: str, name: str, known: Mapping[str, Entry]) -> Entry:
    """Return the known entry of a name. `kind` says in words what the entries are.

    Raises:
        Refused: the name is unknown.
    """
    if name not in known:
        raise Refused(f"the {kind} {name!r} is unknown: use {', '.join(known)}.")
    return known[name]
