"""Lists of graphs that are refused, and regular expressions for what is said."""

from __future__ import annotations

from collections.abc import Iterator

from tests.support.graphs.flux import Graph

Refusals = Iterator[tuple[Graph, str]]
"""Graphs, each with a regular expression for its sentence. Each is to be run before the next is asked for."""


def exactly(sentence: str) -> str:
    """The expression for a sentence."""
    return f"{literally(sentence)}$"


def literally(text: str) -> str:
    """As re.escape, for the expressions of a page too."""
    return "".join(f"\\{sign}" if sign in r"\^$.*+?()[]{}|" else sign for sign in text)
