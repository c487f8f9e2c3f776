"""Lists of graphs that are refused, and regular expressions for their sentences."""

from __future__ import annotations

from collections.abc import Iterator

from tests.support.graphs.flux import Graph

Refusals = Iterator[tuple[Graph, str]]
"""Graphs, each with a regular expression for its sentence. A caller must run each graph before it requests the next."""


def exactly(sentence: str) -> str:
    """Return the expression that matches exactly a sentence."""
    return f"{literally(sentence)}$"


def literally(text: str) -> str:
    """Escape a text as re.escape does, also for regular expressions in JavaScript."""
    return "".join(f"\\{sign}" if sign in r"\^$.*+?()[]{}|" else sign for sign in text)
