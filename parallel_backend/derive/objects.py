"""Objects that nodes put into a prompt, such as what a vision model has seen, as dicts of their attributes, and back."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

ATTRIBUTES = "attributes of an object"
"""The one entry of such a dict."""


def as_dicts(tree: Any, kind: type) -> Any:
    """A tree of lists and dicts with a dict in the place of each object of a kind."""
    if isinstance(tree, kind):
        return {ATTRIBUTES: as_dicts(vars(tree), kind)}
    return _each(tree, lambda item: as_dicts(item, kind))


def as_objects(tree: Any) -> Any:
    """The same tree with objects of these attributes again."""
    if isinstance(tree, dict) and ATTRIBUTES in tree:
        return SimpleNamespace(**as_objects(tree[ATTRIBUTES]))
    return _each(tree, as_objects)


def _each(tree: Any, change: Callable[[Any], Any]) -> Any:
    if type(tree) in (list, tuple):
        return type(tree)(change(item) for item in tree)
    return {name: change(item) for name, item in tree.items()} if type(tree) is dict else tree
